"""The same on shardrec: ``torchrun --nproc-per-node 2 -m examples.dlrm_torchrec_migration.after FOLDER STEPS``."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.optim import RowWiseAdagrad

import shardrec
from examples.dlrm_torchrec_migration.model import batches, dlrm
from shardrec.pipeline import TrainPipeline


def train(folder: Path, steps: int) -> list[float]:
    """Train from the checkpoint in ``folder`` up to this step.

    Returns:
        The loss per step, and of the INT8 model on a batch that was not trained on.
    """
    rank = dist.get_rank()
    model = dlrm()
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05, "eps": 1e-8})
    plan = shardrec.plan(model, constraints={"*": shardrec.Constraint(cuts=("table_wise",))})
    model = shardrec.shard(model, plan)
    optimizer = torch.optim.Adagrad(model.dense_parameters(), lr=0.02)
    checkpoints = shardrec.Checkpoints(folder)
    last = checkpoints.load_last(model, optimizer)
    losses = []
    pipeline = TrainPipeline(model, optimizer, batches(rank, range(last.step if last else 0, steps)))
    for loss, _ in pipeline:
        losses.append(loss.item())
    checkpoints.save(steps, model, optimizer)
    served = shardrec.serve.quantize(model, "int8")
    for batch in batches(rank, range(1000, 1001)):
        loss, _ = served(batch)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train, and show rank 0's losses."""
    dist.init_process_group("gloo")
    losses = train(Path(sys.argv[1]), int(sys.argv[2]))
    if dist.get_rank() == 0:
        print("losses:", *(f"{loss:.4f}" for loss in losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
