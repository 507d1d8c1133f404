"""A DLRM on TorchRec: ``torchrun --nproc-per-node 2 -m examples.dlrm_torchrec_migration.before FOLDER STEPS``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.inference.modules import quantize_inference_model
from torchrec.inference.state_dict_transform import state_dict_gather
from torchrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from examples.dlrm_torchrec_migration.model import TABLES, batches, dlrm


def train(folder: Path, steps: int) -> list[float]:
    """Train from the checkpoint in ``folder`` up to this step.

    Returns:
        The loss per step, and of the INT8 model on a batch that was not trained on.
    """
    rank = dist.get_rank()
    device = torch.device("cpu")
    model = dlrm()
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05, "eps": 1e-8})
    sharders = [EmbeddingBagCollectionSharder()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={name: ParameterConstraints(sharding_types=["table_wise"]) for name in TABLES},
    )
    plan = planner.collective_plan(model, sharders)
    model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.02),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
    if folder.exists():
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    loader = batches(rank, range(state["step"], steps))
    for _ in range(state["step"], steps):
        loss, _, _ = pipeline.progress(loader)
        losses.append(loss.item())
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": steps}, checkpoint_id=folder)
    served = dlrm()
    state_dict_gather(model.state_dict(), served.state_dict())  # to rank 0
    served = quantize_inference_model(served).eval()
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
