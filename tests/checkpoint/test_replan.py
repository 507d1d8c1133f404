"""`model.replan`: the plan follows the ids of the last batches, if that pays; losses do not depend on it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec import KeyedJaggedTensor

from shardrec.checkpoint import replan as replan_module
from shardrec.errors import CheckpointError, ConfigError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.planner import Constraint
from tests.checkpoint.reshards import DIM, SEQUENCES, Case, Table, contents, differences, make
from tests.ranks import ranks

ROWS = 2_000
TABLES = {
    "a": Table(rows=ROWS),
    "b": Table(rows=ROWS, optimizer="rowwise_adagrad"),
    "c": Table(rows=ROWS),
    "d": Table(rows=ROWS, dynamic=True),
    "s": Table(rows=ROWS, collection=SEQUENCES),
    "u": Table(rows=ROWS, collection=SEQUENCES),
}
WHOLE = {"*": Constraint(cuts=("table_wise",))}
"""So that sums are in one order under any plan."""


def tables_on(ranks_of: Mapping[str, int]) -> ShardingPlan:
    return ShardingPlan(
        topology=Topology(ranks_per_host=2),
        tables=tuple(
            cuts.table_wise(f"{table.collection}.{name}", ROWS, DIM, rank=ranks_of[name])
            for name, table in TABLES.items()
        ),
    )


OLD = tables_on(dict(zip(TABLES, (0, 1, 0, 1, 0, 1), strict=True)))


def batch(step: int, hot: str, samples: int = 64) -> KeyedJaggedTensor:
    """Of this rank: two ids of a sample, of the features that are hot a hundred."""
    draws = torch.Generator().manual_seed(10 * step + dist.get_rank())
    counts = torch.tensor([[100 if name in hot else 2] * samples for name in TABLES]).view(-1)
    ids = torch.randint(ROWS, (int(counts.sum()),), generator=draws)
    return KeyedJaggedTensor(keys=list(TABLES), values=ids, lengths=counts)


def train(pair: Any, batches: list[KeyedJaggedTensor]) -> list[float]:
    model, optimizer = pair
    losses = []
    for features in batches:
        optimizer.zero_grad()
        loss = model(features).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_plan_follows_ids_that_drift() -> None:
    """Tables of rank 0 become hot; beside a model whose plan is fixed, and one whose ids stay as they were."""
    case = Case(tables=TABLES, plans=[OLD])

    def rank_main() -> tuple[str, str]:
        follows, fixed = make(case, OLD), make(case, OLD)
        model = follows[0]
        before, after = ([batch(step, hot) for step in (0, 1)] for hot in ("", "acs"))
        assert train(follows, before) == train(fixed, before)
        assert model.replan(before, steps=1e6, constraints=WHOLE) is None and model.plan == OLD
        assert train(follows, after) == train(fixed, after)
        change = model.replan(iter(after), steps=1e6, constraints=WHOLE)
        assert change is not None and (change.old, change.new) == (OLD, model.plan)
        assert change.new_ms < 0.9 * change.old_ms
        holders = {model.plan.by_name[name].shards[0].rank for name in ("bags.a", "bags.c", "sequences.s")}
        assert holders == {0, 1}, "the hot tables are on both ranks"
        assert train(follows, after) == train(fixed, after)
        assert model.replan(after, steps=1e6, constraints=WHOLE) is None, "it is as it should be"
        return str(model.plan.fingerprint), str(change)

    (plan, text), (other, _) = ranks(2, rank_main)
    assert plan == other
    assert text.startswith("moved ") and "MiB, in " in text and "predicted to take" in text


def test_ids_of_all_ranks_count() -> None:
    """Of which the first rank, which plans, has seen only some, and of some features none."""

    def rank_main() -> bool:
        model, _ = make(Case(tables=TABLES, plans=[OLD]), OLD)
        seen = batch(0, "acs" if dist.get_rank() else "")
        halves = seen.split([1, len(TABLES) - 1])
        return model.replan([seen, halves[dist.get_rank()]], steps=1e6, constraints=WHOLE) is not None

    assert ranks(2, rank_main) == [True, True]


def test_a_failure_leaves_the_plan() -> None:
    """Of the planner, on the first rank; of a rank without samples; of the move; one message on all ranks."""
    case = Case(tables=TABLES, plans=[OLD])

    def rank_main() -> list[str]:
        model, optimizer = make(case, OLD)
        messages = []

        def failing(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("no memory left")

        def refused(
            error: type[Exception], batches: list[KeyedJaggedTensor], patched: str = "", **options: Any
        ) -> None:
            before = contents(model, optimizer)
            with pytest.MonkeyPatch.context() as patch:
                if patched:
                    patch.setattr(replan_module, patched, failing)
                with pytest.raises(error) as raised:
                    model.replan(batches, steps=1e6, **options)
            assert model.plan == OLD and not differences(contents(model, optimizer), before)
            messages.append(str(raised.value).partition("\n")[0])

        refused(CheckpointError, [batch(0, "acs")], "paying_plan")
        refused(ConfigError, [batch(0, "acs", samples=dist.get_rank())])
        refused(ConfigError, [batch(0, "acs")], constraints={"nothing": WHOLE["*"]})
        refused(ConfigError, [batch(0, "acs")], min_gain=-1.0)
        pending = model.bags(batch(0, ""))
        refused(ConfigError, [batch(0, "acs")])
        pending.wait()
        return messages

    one, other = ranks(2, rank_main)
    assert one == other
    expected = (
        "rank 0: MemoryError: no memory left",
        "rank 0: sample_batches holds no sample",
        "'nothing'",
        "min_gain is -1.0. Give a number above 0",
        "were not used",
    )
    assert all(part in text for part, text in zip(expected, one, strict=True)), one


def test_planning_may_take_longer_than_a_rank_may_be_silent() -> None:
    def rank_main() -> bool:
        model, _ = make(Case(tables=TABLES, plans=[OLD]), OLD)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.6), dist.group.WORLD)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replan_module, "paying_plan", lambda *_, **__: time.sleep(1))
            patch.setattr(replan_module, "timeout_s", lambda *_: 0.6)
            return model.replan([batch(0, "acs")], steps=1e6, constraints=WHOLE) is None

    assert ranks(2, rank_main) == [True, True]
