"""shardrec and TorchRec's DistributedModelParallel: the same module, plan and weights."""

from __future__ import annotations

import abc
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.module import unsharded_module
from benchmarks.harness.timing.case import Case, Job
from benchmarks.harness.timing.dense import DENSE_LR, DenseInputs, click_model, dense_parameters
from benchmarks.harness.timing.inputs import Batch, fill_gradient, fill_weight
from benchmarks.harness.timing.plans import TABLES_OF_DLRM, renamed
from shardrec.launch.ranks import RankInfo
from shardrec.layout import ShardingPlan

__all__ = ["ShardrecSide", "TorchRecSide"]

_WEIGHT = re.compile(r"embedding_bags\.t(\d+)\.weight$")


class _ShardedSide(abc.ABC):
    """What the two have in common: everything but how the module is sharded.

    Args:
        job: what is measured.
        rank_info: this rank.

    Attributes:
        model: sharded.
    """

    def __init__(self, job: Job, rank_info: RankInfo) -> None:
        self.keys: list[str] = []
        self.widths: list[int] = []
        self._case = job.case
        self._place = rank_info
        plan = ShardingPlan.from_json(job.plan)
        collection = unsharded_module(job.case.tables, pooled=True, weighted=False, optimizer=job.case.optimizer)
        torch.manual_seed(job.seed)
        if job.case.mode == "dlrm":
            model = click_model(collection, rank_info.device)
            self.model = self._shard(model, renamed(plan, TABLES_OF_DLRM), rank_info)
            self._dense = DenseInputs(job.case.batch_size, rank_info)
            self._optimizer = torch.optim.SGD(dense_parameters(self.model), lr=DENSE_LR)
        else:
            self.model = self._shard(collection, plan, rank_info)
        _fill(self.model)
        self._gradient: Tensor | None = None

    @abc.abstractmethod
    def _shard(self, model: nn.Module, plan: ShardingPlan, rank_info: RankInfo) -> nn.Module:
        """The model, sharded."""

    def prepare(self, batch: Batch) -> KeyedJaggedTensor:
        """A new KeyedJaggedTensor."""
        return batch.features()

    def step(self, inputs: KeyedJaggedTensor) -> Tensor:
        """The case's step. Returns pooled columns, or logits."""
        match self._case.mode:
            case "forward":
                return self._forward(inputs)
            case "train":
                return self._train(inputs)
        return self._train_click_model(inputs)

    @torch.no_grad()
    def _forward(self, inputs: KeyedJaggedTensor) -> Tensor:
        output = self.model(inputs)
        values: Tensor = output.values()
        if not self.keys:
            self.keys, self.widths = list(output.keys()), list(output.length_per_key())
        return values

    def _train(self, inputs: KeyedJaggedTensor) -> Tensor:
        output = self.model(inputs)
        values: Tensor = output.values()
        if self._gradient is None:
            self.keys, self.widths = list(output.keys()), list(output.length_per_key())
            self._gradient = gradient_of(self._case, self.keys, self._place)
        values.backward(self._gradient)
        return values

    def _train_click_model(self, inputs: KeyedJaggedTensor) -> Tensor:
        self.keys, self.widths = ["logits"], [1]
        self._optimizer.zero_grad(set_to_none=True)
        logits: Tensor = self.model(self._dense.values, inputs)
        nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), self._dense.labels).backward()
        self._optimizer.step()
        return logits


class ShardrecSide(_ShardedSide):
    """``shardrec.shard``."""

    def _shard(self, model: nn.Module, plan: ShardingPlan, rank_info: RankInfo) -> nn.Module:
        import shardrec

        transport: Any = self._case.transport
        before = os.environ.get("SHARDREC_KERNELS")
        os.environ["SHARDREC_KERNELS"] = self._case.kernels
        try:
            return shardrec.shard(model, plan, device=rank_info.device, transport=transport)
        finally:
            del os.environ["SHARDREC_KERNELS"]
            if before is not None:
                os.environ["SHARDREC_KERNELS"] = before


class TorchRecSide(_ShardedSide):
    """``DistributedModelParallel`` with fused kernels and the plan written in TorchRec's terms."""

    def _shard(self, model: nn.Module, plan: ShardingPlan, rank_info: RankInfo) -> nn.Module:
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingEnv

        from shardrec.planner.torchrec_plan import to_torchrec

        group = dist.group.WORLD
        assert group is not None, "a rank that measures is in a process group"
        paths = {layout.name: layout.name.rpartition(".")[0] for layout in plan.tables}
        sharded: nn.Module = DistributedModelParallel(
            model,
            env=ShardingEnv.from_process_group(group),
            device=rank_info.device,
            plan=to_torchrec(plan, device=rank_info.device.type, paths=paths),
            sharders=[EmbeddingBagCollectionSharder()],
            # On one rank shardrec averages no gradients, and so does TorchRec without DDP.
            init_data_parallel=rank_info.world_size > 1,
        )
        return sharded


def gradient_of(case: Case, keys: Sequence[str], rank_info: RankInfo) -> Tensor:
    """(B, all columns) the output's gradient on this rank, the columns in the order of ``keys``."""
    numbers = {table.feature: number for number, table in enumerate(case.tables)}
    widths = [case.tables[numbers[key]].dim for key in keys]
    gradient = torch.empty(case.batch_size, sum(widths), device=rank_info.device)
    for key, columns in zip(keys, gradient.split(widths, dim=1), strict=True):
        fill_gradient(columns, numbers[key], rank_info.rank)
    return gradient


def _fill(model: nn.Module) -> None:
    """Write the initial weights into this rank's part of every table."""
    for name, value in model.state_dict().items():
        found = _WEIGHT.search(name)
        if found is None:
            continue
        number = int(found.group(1))
        sharded: Any = value
        if not hasattr(sharded, "local_shards"):
            fill_weight(value, number)
            continue
        for shard in sharded.local_shards():
            fill_weight(shard.tensor, number, *shard.metadata.shard_offsets)
