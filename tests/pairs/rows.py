"""A row, run on the ranks of a process group: three steps, the carrier, an evaluation and two more steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardrec
from shardrec.checkpoint import export_ids, import_ids
from shardrec.errors import ShardrecError
from shardrec.rpc import EmbeddingServer, RpcWorld
from shardrec.serve import quantize
from tests.pairs.axes import PIPELINES, Row
from tests.pairs.models import IDS, Batch, batch_of, half_of, plan_of
from tests.pairs.sharded import Place, Sharded, give_dense_optimizers, given_model
from tests.pairs.unsharded import Unsharded
from tests.rpc.jobs import in_job

__all__ = ["Refusal", "run_row"]

STEPS, MORE = 3, 2
OVERFLOWS = 1
"""The step that a GradScaler skips."""
EVALUATION, EXTRA = 100, 101
"""Numbers of the batches of an evaluation."""
EVEN, ODD = range(0, IDS, 2), range(1, IDS, 2)


class Refusal(Exception):
    """The row was refused.

    Args:
        stage: what was refused: "shard", "execute", "pipeline", "step", "carrier" or "evaluation".
        error: of the library.
        changed: what the refused call has changed.
    """

    def __init__(self, stage: str, error: ShardrecError, changed: list[str]) -> None:
        super().__init__(stage, str(error), changed)
        self.stage, self.text, self.kind, self.changed = stage, str(error), type(error).__name__, changed

    def __reduce__(self) -> Any:
        return _refusal, (self.stage, self.text, self.kind, self.changed)


def _refusal(stage: str, text: str, kind: str, changed: list[str]) -> Refusal:
    made = Refusal(stage, ShardrecError(text), changed)
    made.kind = kind
    return made


def run_row(row: Row, folder: Path, address: str) -> list[str]:
    """Run a row on this rank.

    Args:
        row: to run.
        folder: of this row, empty.
        address: of a TCPStore.

    Returns:
        What differs from the unsharded model. A refusal is told as ``"refused ..."``, with what it has changed.
    """
    if row.mode != "servers":
        group = dist.new_group([0, 1])
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        return Run(
            row, folder, Place(rank=dist.get_rank(), group=group, alone=alone, servers=(), address=address)
        ).run()

    def trainer(world: RpcWorld, rank: int, group: Any) -> list[str]:
        return Run(row, folder, Place(rank=rank, group=group, alone=None, servers=world.servers, address="")).run()

    def server(rank: int) -> EmbeddingServer:
        return EmbeddingServer(given_model(row, 0), plan_of(row, 2), rank)

    return in_job(str(folder / "store"), trainer, server, polls=False) or []


class Run:
    """The run of a row."""

    def __init__(self, row: Row, folder: Path, place: Place) -> None:
        self.row, self.folder, self.place = row, folder, place
        self.faults: list[str] = []
        self.number = 0
        self.tolerance = 6 * torch.finfo(half_of(row)).eps if row.table == "16 bit" else 1e-4
        self.micro = 2 if row.gradients == "accumulation" else 1

    def run(self) -> list[str]:
        """All of it; stops where it was refused before training."""
        try:
            given = given_model(self.row, 0)
            modules, values = list(given.modules()), {name: each.clone() for name, each in given.named_parameters()}
            try:
                self.sharded = self._refusable("shard", lambda: Sharded(self.row, self.place, given))
            except Refusal as refusal:
                now = dict(given.named_parameters())
                refusal.changed += [
                    name for name in values if name not in now or not torch.equal(values[name], now[name])
                ]
                refusal.changed += [] if list(map(id, given.modules())) == list(map(id, modules)) else ["its modules"]
                raise
            self.expected = Unsharded(self.row, given_model(self.row, 0))
            self.sharded.give_optimizers()
            self._refusable("execute", self.sharded.execute)
            self.sharded.begin()
            self.loop = self._refusable("pipeline", self._loop)
            for _ in range(STEPS):
                self._step()
            self._compare("after three steps")
            for stage, call in (("carrier", self._carry), ("evaluation", self._evaluate)):
                try:
                    self._refusable(stage, call)
                except Refusal as refusal:
                    self._tell(refusal)
                self._compare(f"after the {stage}")
            for _ in range(MORE):
                self._step()
            self._compare("at the end")
        except Refusal as refusal:
            self._tell(refusal)
        return self.faults

    def _tell(self, refusal: Refusal) -> None:
        changed = f"; changed: {', '.join(refusal.changed)}" if refusal.changed else ""
        self.faults.append(f"refused at {refusal.stage} by {refusal.kind}: {refusal.text}{changed}")

    def _refusable(self, stage: str, call: Callable[[], Any]) -> Any:
        sharded = getattr(self, "sharded", None)
        before = sharded.contents() if sharded is not None else {}
        try:
            return call()
        except ShardrecError as error:
            if sharded is None:
                raise Refusal(stage, error, []) from error
            after = sharded.contents()
            changed = sorted(before.keys() ^ after.keys())
            changed += [key for key in before if key in after and not torch.equal(before[key], after[key])]
            raise Refusal(stage, error, [key for key in changed if not key.startswith("gradient")]) from error

    def _of_ranks(self, number: int, *, reference: bool, ids: Any = range(IDS)) -> list[Batch]:
        return [batch_of(self.row, number, rank, reference=reference, ids=ids) for rank in range(2)]

    def _own(self, number: int, *, ids: Any = range(IDS)) -> Batch:
        return batch_of(self.row, number, self.place.rank, reference=False, ids=ids)

    def _batches(self, first: int) -> Iterator[Batch]:
        for number in range(first * self.micro, (STEPS + MORE) * self.micro):
            yield self._own(number)

    def _loop(self) -> Any:
        return iter(self.sharded.pipeline(self._batches(self.number))) if self.row.mode in PIPELINES else None

    def _step(self) -> None:
        """A step of both, the outputs compared."""
        number, numbers = self.number, range(self.number * self.micro, (self.number + 1) * self.micro)
        # What detect_anomaly looks for is what a GradScaler skips; a pipeline's loss is the program's.
        by_hand = self.loop is None
        overflows = (
            self.row.gradients == "GradScaler" and number == OVERFLOWS and by_hand and self.row.mode != "detect_anomaly"
        )
        if by_hand:
            outputs = self._refusable(
                "step",
                lambda: self.sharded.step(
                    [self._own(each) for each in numbers],
                    overflows=overflows and self.place.rank == 1,
                    refusing=lambda call: self._refusable("step", call),
                ),
            )
        else:
            outputs = [self._refusable("step", lambda: next(self.loop))[1].detach() for _ in numbers]
        expected = self.expected.step([self._of_ranks(each, reference=True) for each in numbers], overflows=overflows)
        self._outputs(f"step {number}", outputs, expected)
        for each in (self.sharded, self.expected):
            each.decay()
        self.number += 1

    def _outputs(self, where: str, outputs: list[Tensor], expected: list[list[Tensor]]) -> None:
        for number, (found, of_ranks) in enumerate(zip(outputs, expected, strict=True)):
            wanted = of_ranks[self.place.rank]
            if not torch.allclose(found, wanted, atol=10 * self.tolerance, rtol=0):
                self.faults.append(f"{where}: output {number} is {found.tolist()} and not {wanted.tolist()}")

    def _compare(self, where: str) -> None:
        self.faults += self.sharded.faults(self.expected, self.tolerance, where)

    def _carry(self) -> None:
        CARRIERS[self.row.carrier](self)

    def another(self, *, other: bool = False) -> Sharded:
        """A model of other first values, for a carrier to give it this one's state."""
        return Sharded(self.row, self.place, given_model(self.row, 1), other=other, name="second")

    def go_on_with(self, model: Sharded) -> None:
        """Train another model from now on; its optimizers are there."""
        model.scaler.load_state_dict(self.sharded.scaler.state_dict())
        for schedule, before in zip(model.schedules, self.sharded.schedules, strict=True):
            schedule.load_state_dict(before.state_dict())
        model.execute()
        model.begin()
        self.sharded = model
        self.loop = self._loop()

    def _evaluate(self) -> None:
        evaluation, sharded = self.row.evaluation, self.sharded
        if evaluation in ("no_sync", "activation checkpointing"):
            parts = [(EVALUATION, EVEN), (EXTRA, ODD)] if evaluation == "no_sync" else [(EXTRA, range(IDS))]
            outputs = sharded.step(
                [self._own(number, ids=ids) for number, ids in parts],
                no_sync=evaluation == "no_sync",
                recomputes=evaluation != "no_sync",
            )
            expected = self.expected.step(
                [self._of_ranks(number, reference=True, ids=ids) for number, ids in parts],
                syncs=evaluation != "no_sync",
            )
            self._outputs(evaluation, outputs, expected)
            return
        if evaluation == "some ranks" and self.place.rank and self.row.mode in ("replicas", "elastic"):
            return
        is_training = evaluation == "no_grad" or (evaluation == "some ranks" and self.place.rank == 1)
        sharded.train(is_training)
        grad = torch.no_grad() if evaluation != "some ranks" or not self.place.rank else nullcontext()
        try:
            with sharded.watched(), grad:
                output = sharded.run(*self._own(EVALUATION)[:3]).detach()
        finally:
            sharded.train(True)
        self._outputs(evaluation, [output], [self.expected.outputs(self._of_ranks(EVALUATION, reference=True))])


def by_checkpoint(run: Run) -> None:
    source = run.sharded
    where = run.folder / f"saved{run.place.rank if run.row.mode == 'elastic' else ''}"
    shardrec.save_checkpoint(where, source.model, source.ordinary)
    model = run.another(other=True)
    model.give_optimizers()
    shardrec.load_checkpoint(where, model.model, model.ordinary)
    if run.row.mode == "elastic":
        model.model.steps = source.model.steps  # type: ignore[assignment]
    run.go_on_with(model)


def by_warm_start(run: Run) -> None:
    source = run.sharded
    where = run.folder / f"saved{run.place.rank if run.row.mode == 'elastic' else ''}"
    shardrec.save_checkpoint(where, source.model, source.ordinary)
    if run.row.mode == "servers":  # whose rows another model would write
        shardrec.warm_start(where, source.model)
    model = run.another(other=True)
    model.give_optimizers()
    shardrec.warm_start(where, model.model, optimizer=True)
    model.execute()
    model.begin()
    run.sharded = model
    run.loop = run._loop()
    run.expected.begin_dense_anew()
    run.expected.begin_tables_anew(states=run.row.optimizer == "ordinary")


def by_state_dict(run: Run, *, assign: bool = False) -> None:
    source = run.sharded
    values = source.model.state_dict()
    if run.row.mode == "servers":  # whose tables are the servers', also another model's
        values = {name: value.clone() for name, value in values.items()}
        model = copy.copy(source)
        optimizers = _states(source)
        dist.barrier(run.place.group)
        model.model.load_state_dict({name: torch.zeros_like(value) for name, value in values.items()})
        dist.barrier(run.place.group)
    else:
        optimizers = _states(source)
        model = run.another()
    model.model.load_state_dict(values, assign=assign)
    dist.barrier(run.place.group)  # of tables on servers, the first trainer has sent the rows
    if assign and run.row.optimizer == "dense in backward":
        give_dense_optimizers(run.row, model.model.module.top)  # type: ignore[arg-type]
    if run.row.table == "dynamic ids":
        export_ids(source.model, run.folder / "ids")
        dist.barrier()
        import_ids(model.model, run.folder / "ids")
    model.give_optimizers()
    for optimizer, states in zip(_optimizers(model), optimizers, strict=True):
        optimizer.load_state_dict(states)
    run.go_on_with(model)


def by_deep_copy(run: Run) -> None:
    source = run.sharded
    model = copy.copy(source)
    model.model = copy.deepcopy(source.model)
    model.give_optimizers()
    if source.ordinary is not None and model.ordinary is not None:
        model.ordinary.load_state_dict(source.ordinary.state_dict())
    run.go_on_with(model)


def by_reshard(run: Run) -> None:
    source = run.sharded
    source.model.reshard(source.other_plan(), source.ordinary if source.fused is None else None)


def by_publishing(run: Run) -> None:
    source = run.sharded
    folder = run.folder / f"published{run.place.rank if run.row.mode == 'elastic' else ''}"
    shardrec.Publisher(source.model, folder).publish()
    if run.place.rank:
        return
    # The server has its rows on one rank, as they are in a process of its own.
    plan = source.plan.on_one_rank()
    options: Any = {"group": run.place.alone}
    if run.row.table == "dynamic ids":
        options["dynamic_ids"] = source.model.context.options.dynamic_ids
    served = quantize(shardrec.shard(given_model(run.row, 1), plan, **options), "fp32")
    follower = served.follow(folder)
    try:
        with torch.no_grad():
            output = served(*run._own(EVALUATION)[:3]).detach()
        run._outputs("served", [output], [run.expected.outputs(run._of_ranks(EVALUATION, reference=True))])
        if follower.fault:
            run.faults.append(f"the follower: {follower.fault}")
    finally:
        follower.close()


def _optimizers(model: Sharded) -> list[Any]:
    return [*model.optimizers, *(optimizer for _, optimizer in model.in_backward())]


def _states(model: Sharded) -> list[Any]:
    """Copies, of values that a load may change in place."""
    return [copy.deepcopy(optimizer.state_dict()) for optimizer in _optimizers(model)]


CARRIERS: dict[str, Callable[[Run], None]] = {
    "checkpoint": by_checkpoint,
    "state_dict": by_state_dict,
    "assign=True": lambda run: by_state_dict(run, assign=True),
    "deep copy": by_deep_copy,
    "reshard": by_reshard,
    "warm start": by_warm_start,
    "published version": by_publishing,
}
