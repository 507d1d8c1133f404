"""The sharded model of a row: how it is made, called and trained, and what it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

import shardrec
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan
from shardrec.modules import ShardedModel
from shardrec.modules.inventory import Kind, RowState, row_states
from shardrec.pipeline import TrainPipeline
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.pairs.axes import Row
from tests.pairs.models import Batch, id_of, loss_of, make_model, plan_of, special_tables, tables_of, weight_of
from tests.pairs.unsharded import CLIP, DECAY, SCALE, Unsharded, dense_optimizer, table_optimizer

__all__ = ["Place", "Sharded", "given_model"]

ELASTIC_PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank runs.

    Args:
        rank: among the two that train.
        group: of these two.
        alone: of this rank.
        servers: names of the embedding servers.
        address: of the store of elastic replicas.
    """

    rank: int
    group: dist.ProcessGroup | None
    alone: dist.ProcessGroup | None
    servers: Sequence[str]
    address: str


def given_model(row: Row, seed: int) -> nn.Module:
    """The unsharded model with its optimizers in backward."""
    model = make_model(row, seed)
    made, settings = table_optimizer(row)
    for name in tables_of(row) if row.optimizer != "ordinary" else ():
        if (weight := weight_of(model, name)).requires_grad:
            apply_optimizer_in_backward(made, [weight], dict(settings))
    if row.optimizer == "dense in backward":
        give_dense_optimizers(row, model.top)  # type: ignore[arg-type]
    return model


def give_dense_optimizers(row: Row, top: nn.Module) -> None:
    made, settings = dense_optimizer(row)
    apply_optimizer_in_backward(made, top.parameters(), dict(settings))


class Scaled:
    """An optimizer whose steps a GradScaler makes, for TrainPipeline; the last one updates the scale."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, *, is_last: bool) -> None:
        self.optimizer, self.scaler, self.is_last = optimizer, scaler, is_last

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        if self.is_last:
            self.scaler.update()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Sharded:
    """A model, its optimizers and what runs it.

    Args:
        row: what it is.
        place: of this rank.
        given: the unsharded model.
        other: whether the plan is the other one.
        name: of the job, of elastic replicas.

    Raises:
        ShardrecError: if ``shard`` refuses it.
    """

    def __init__(self, row: Row, place: Place, given: nn.Module, *, other: bool = False, name: str = "first") -> None:
        self.row, self.place = row, place
        self.plan = self._plan(other)
        options: dict[str, Any] = {"update": row.update, "group": place.group}
        if row.dense == "fsdp":
            options["dense"] = "fsdp"
        if row.table == "dynamic ids":
            options["dynamic_ids"] = {each: DynamicIds(evict="never") for each in special_tables(row)}
        if row.mode == "replicas":
            options["replicas"] = shardrec.Replicas(2)
        elif row.mode == "elastic":
            address = f"{place.address}/{name}"
            options["replicas"] = shardrec.Replicas(2, elastic=address, patience_s=ELASTIC_PATIENCE_S)
            options["group"] = place.alone
        elif row.mode == "servers":
            options["servers"] = shardrec.Servers(place.servers)
        self.model: ShardedModel = shardrec.shard(given, self.plan, **options)

    def _plan(self, other: bool) -> ShardingPlan:
        ranks, servers = 1 if self.row.mode in ("replicas", "elastic") else 2, self.row.mode == "servers"
        return plan_of(self.row, ranks, other=other and not servers)  # which have their plan

    def other_plan(self) -> ShardingPlan:
        return self._plan(True)

    def give_optimizers(self) -> None:
        """The ordinary optimizer, that of the tables, their schedules and a scaler, as a program makes them."""
        row, model = self.row, self.model
        made, settings = dense_optimizer(row)
        rest = [parameter for _, parameter in self.dense_parameters()]
        groups: list[dict[str, Any]] = [] if row.optimizer == "dense in backward" else [{"params": rest}]
        self.fused = None if row.optimizer == "ordinary" else model.fused_optimizer
        if self.fused is None:
            groups.append({"params": self._of_tables(), "lr": table_optimizer(row)[1]["lr"]})
        self.ordinary = made(groups, **settings) if groups else None  # type: ignore[arg-type]
        self.optimizers = [each for each in (self.fused, self.ordinary) if each is not None]
        self.schedules = [ExponentialLR(each, DECAY) for each in self.optimizers]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=row.gradients == "GradScaler")

    def _of_tables(self) -> list[nn.Parameter]:
        """Parameters of tables that an ordinary optimizer trains."""
        tables = [table for collection in self.model.sharded_collections for table in collection.tables().values()]
        return [parameter for table in tables for parameter in table.parameters() if parameter.requires_grad]

    def execute(self) -> None:
        """Have the row's executor run the model.

        Raises:
            ShardrecError: if it refuses it.
        """
        self.run = executed(self.model, self.row.executor)

    def begin(self) -> None:
        """What has to be done before the first step."""
        if self.row.mode == "elastic":
            self.model.join(*self.optimizers)  # type: ignore[operator]

    def pipeline(self, batches: Iterator[Batch]) -> TrainPipeline:
        """The loop, in the modes that are one.

        Raises:
            ConfigError: if it refuses the model.
        """
        optimizers: Any = self.optimizers
        if self.row.gradients == "GradScaler":
            optimizers = [Scaled(each, self.scaler, is_last=each is self.optimizers[-1]) for each in self.optimizers]
        return TrainPipeline(
            self.model,
            optimizers,
            batches,
            loss_fn=self._loss_and_output,
            depth=int(self.row.mode[-1]),
            accumulate=2 if self.row.gradients == "accumulation" else 1,
            clip_norm=CLIP if self.row.gradients == "clipping" else None,
        )

    def _loss_and_output(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = self.run(*batch[:3])
        return self.scaler.scale(loss_of(logits, batch[3])), logits

    def watched(self) -> AbstractContextManager[None]:
        """``detect_anomaly``, in its mode."""
        return shardrec.detect_anomaly(self.model) if self.row.mode == "detect_anomaly" else nullcontext()

    def step(
        self,
        micro_batches: Sequence[Batch],
        *,
        no_sync: bool = False,
        recomputes: bool = False,
        overflows: bool = False,
        refusing: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> list[Tensor]:
        """An update by hand.

        Args:
            micro_batches: of this rank.
            no_sync: whether all but the last are inside of ``no_sync``.
            recomputes: whether backward computes the forward again.
            overflows: whether this rank's gradients are infinite.
            refusing: makes a call that may refuse the row.

        Returns:
            Outputs.
        """
        outputs = []
        self.zero_grad()
        # Of several graphs that fit a batch, dynamo takes the last one used, and a recomputation needs the same.
        torch._C._dynamo.eval_frame._set_lru_cache(not recomputes)
        with self.watched():
            for number, batch in enumerate(micro_batches):
                is_last = number == len(micro_batches) - 1
                with self.model.no_sync() if no_sync and not is_last else nullcontext():
                    if recomputes:
                        # A scripted function keeps other tensors in its second run, which torch refuses by itself.
                        is_scripted = self.row.executor == "live script"
                        dense = batch[0].clone().requires_grad_(is_scripted)
                        logits = checkpoint(self.run, dense, *batch[1:3], use_reentrant=is_scripted)
                    else:
                        logits = self.run(*batch[:3])
                    loss = loss_of(logits, batch[3]) / len(micro_batches)
                    self.scaler.scale(loss * torch.inf if overflows else loss).backward()
                outputs.append(logits.detach())
        if self.row.gradients == "clipping":
            refusing(lambda: shardrec.clip_grad_norm_(self.model, CLIP))
        for optimizer in self.optimizers:
            refusing(lambda optimizer=optimizer: self.scaler.step(optimizer))
        self.scaler.update()
        self.zero_grad()
        return outputs

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def decay(self) -> None:
        """The learning rates of the next step."""
        for schedule in self.schedules:
            schedule.step()
        for _, optimizer in self.in_backward():
            optimizer.param_groups[0]["lr"] *= DECAY

    def in_backward(self) -> list[tuple[str, Any]]:
        """The optimizers in backward of dense parameters, by name."""
        return [
            (name, each)
            for name, parameter in self.dense_parameters()
            for each in getattr(parameter, "_in_backward_optimizers", ())
        ]

    def dense_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self.model.named_parameters() if name.startswith("top.")]

    def train(self, is_training: bool) -> None:
        self.model.train(is_training)
        if self.run is not self.model:
            self.run.train(is_training)

    def faults(self, expected: Unsharded, tolerance: float, where: str) -> list[str]:
        """What of this rank differs from the unsharded model."""
        if self.row.mode in ("replicas", "elastic"):
            self.model.sync_replicas()  # type: ignore[operator]
        pairs = [*self._table_values(expected), *self._dense_values(expected)]
        faults = [
            f"{where}: {name} is off by {_distance(found, value)}"
            for name, found, value in pairs
            if not _close(found, value, tolerance)
        ]
        for name, rate, wanted in self._rates(expected):
            if abs(rate - wanted) > 1e-9:
                faults.append(f"{where}: the learning rate of {name} is {rate} and not {wanted}")
        return faults

    def _table_values(self, expected: Unsharded) -> Iterator[tuple[str, Tensor, Tensor]]:
        if self.row.mode == "servers":
            values = self.model.state_dict()
            for name, table in expected.tables.items():
                key = name.replace(".t_", ".embedding_bags.t_" if name.startswith("bags") else ".embeddings.t_")
                yield name, values[f"{key}.weight"], table
            return
        places: dict[int, tuple[str, Any]] = {}
        for collection in self.model.sharded_collections:
            for state in row_states(collection):
                if state.kind not in (Kind.WEIGHT, Kind.FUSED):
                    continue
                name = state.table.layout.name
                whole = expected.tables[name] if state.kind is Kind.WEIGHT else expected.states(name).get(state.name)
                for shard, tensor in state.tensors.items():
                    if state.kind is Kind.WEIGHT:
                        places[id(state.table.locals[shard])] = name, (collection, state, shard)
                    if whole is None:
                        whole = torch.full_like(expected.tables[name], 0.1)
                    yield f"{name} {state.name}", *_part(collection, state, shard, tensor, whole)
        if self.fused is None:
            assert self.ordinary is not None, "it trains the tables"
            for parameter, states in self.ordinary.state.items():
                if id(parameter) not in places:
                    continue
                name, (collection, state, shard) = places[id(parameter)]
                for key, value in states.items():
                    if key != "step" and value is not None:
                        wanted = expected.states(name)[key]
                        yield f"{name} {key}", *_part(collection, state, shard, value, wanted)

    def _dense_values(self, expected: Unsharded) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, parameter in self.dense_parameters():
            yield name, _whole(parameter), expected.dense[name]
            optimizers = [each for owner, each in self.in_backward() if owner == name] or [self.ordinary]
            assert optimizers[0] is not None, f"nothing trains {name}"
            for key, value in optimizers[0].state.get(parameter, {}).items():
                if key != "step" and value is not None:
                    wanted = expected.states(name).get(key)
                    yield f"{name} {key}", _whole(value), torch.zeros_like(_whole(value)) if wanted is None else wanted

    def _rates(self, expected: Unsharded) -> Iterator[tuple[str, float, float]]:
        of_tables = expected.rate(next(name for name in expected.tables if name in expected.optimizers))
        of_dense = expected.rate(next(iter(expected.dense)))
        for group in self.fused.param_groups if self.fused is not None else ():
            yield "tables", group["lr"], of_tables
        for group, wanted in zip(
            self.ordinary.param_groups if self.ordinary else (), (of_dense, of_tables), strict=False
        ):
            yield "an ordinary group", group["lr"], wanted
        for name, optimizer in self.in_backward():
            yield name, optimizer.param_groups[0]["lr"], expected.rate(name)

    def contents(self) -> dict[str, Tensor]:
        """Copies of all that a refusal must leave alone."""
        held: dict[str, Tensor] = {}
        if self.row.mode == "servers":
            held |= {f"value {name}": value.clone() for name, value in self.model.state_dict().items()}
        else:
            for collection in self.model.sharded_collections:
                for state in row_states(collection):
                    for number, tensor in enumerate(state.tensors.values()):
                        held[f"{state.kind.value} {state.table.layout.name} {state.name} {number}"] = tensor.clone()
        for name, value in (*self.model.named_parameters(), *self.model.named_buffers()):
            held[name] = _local(value).clone()
            if value.grad is not None:
                held[f"gradient of {name}"] = _local(value.grad).clone()
        for number, optimizer in enumerate([*self.optimizers, *(each for _, each in self.in_backward())]):
            held[f"rates {number}"] = torch.tensor([group["lr"] for group in optimizer.param_groups])
            for index, states in enumerate(optimizer.state.values()):
                for key, value in states.items():
                    if isinstance(value, Tensor):
                        held[f"state {number} {index} {key}"] = _local(value).clone()
        return held


def _local(value: Tensor) -> Tensor:
    if isinstance(value, ShardedTensor):
        return torch.cat([torch.zeros(0), *(shard.tensor.detach().flatten() for shard in value.local_shards())])
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def _whole(value: Tensor) -> Tensor:
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def _part(collection: Any, state: RowState, shard: Any, tensor: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """A shard's values, and the unsharded model's of the same rows and columns; of dynamic ids, of rows with an id."""
    tensor, whole = tensor.detach().float(), whole.detach().float()
    name = state.table.layout.name
    if collection.id_maps is not None and name in collection.id_maps.options:
        for (first, *_), id_map in collection.id_maps.blocks(name):
            if first == shard:
                rows = (id_map.records[:, 1] > 0).nonzero().squeeze(1)
                numbers = [id_of(int(raw)) for raw in id_map.records[rows, 0]]
                return tensor[rows], whole[numbers]
        raise AssertionError(f"{name} has no ids of {shard}")
    if shard is None:
        return tensor, whole
    return tensor, whole[shard.row_start : shard.row_end, shard.col_start : shard.col_end]


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    found, expected = found.detach().float(), expected.detach().float()
    return found.shape == expected.shape and torch.allclose(found, expected, atol=tolerance, rtol=tolerance)


def _distance(found: Tensor, expected: Tensor) -> str:
    if found.shape != expected.shape:
        return f"its shape, {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return f"{float((found.detach().float() - expected.detach().float()).abs().max()):.2g}"
