"""Lookup groups: one per way to learn, alike on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardrec.exchange.collectives import LocalCollectives
from shardrec.exchange.route import Lookup, build_route
from shardrec.layout import TableLayout, cuts
from shardrec.lookup.groups import GroupMode, LookupTable, group_tables
from shardrec.lookup.optimizers import FusedOptimizer, OptimizerKind
from shardrec.lookup.shards import ShardLookup

CPU = torch.device("cpu")
SGD = FusedOptimizer(kind=OptimizerKind.SGD, lr=0.5)
ADAM = FusedOptimizer(kind=OptimizerKind.ADAM, lr=0.5)
ROWWISE = FusedOptimizer(kind=OptimizerKind.ROWWISE_ADAGRAD, lr=0.5)


def whole(name: str) -> TableLayout:
    return cuts.table_wise(name, 5, 8, rank=0)


def halves(name: str) -> TableLayout:
    return cuts.column_wise(name, 5, 8, ranks=[0, 1])


def table(layout: TableLayout, optimizer: FusedOptimizer | None, dtype: torch.dtype = torch.float32) -> LookupTable:
    return LookupTable(layout=layout, optimizer=optimizer, dtype=dtype)


def test_a_group_for_each_way_to_learn() -> None:
    tables = [
        table(whole("a"), SGD),
        table(whole("b"), None),
        table(whole("c"), ADAM),
        table(whole("d"), ROWWISE),
        table(halves("e"), ROWWISE),
        table(cuts.data_parallel("f", 5, 8), SGD),
        table(halves("g"), SGD),
        table(whole("h"), FusedOptimizer(kind=OptimizerKind.SGD, lr=0.25)),
        table(cuts.row_wise("i", 5, 8, ranks=[0, 1]), ROWWISE),
    ]
    found = [(group.mode, "".join(layout.name for layout in group.layouts)) for group in group_tables(tables, CPU)]
    assert found == [
        (GroupMode.FUSED, "ag"),
        (GroupMode.DENSE, "b"),
        (GroupMode.ROWS, "c"),
        (GroupMode.FUSED, "di"),
        (GroupMode.WHOLE_ROWS, "e"),
        (GroupMode.FUSED, "h"),
    ]


def test_adam_has_a_kernel_on_cuda() -> None:
    (group,) = group_tables([table(whole("a"), ADAM)], torch.device("cuda"))
    assert group.mode is GroupMode.FUSED


def test_replicated_tables_are_in_no_group() -> None:
    assert group_tables([table(cuts.data_parallel("a", 5, 8), SGD)], CPU) == ()


def test_local_shards_come_table_by_table() -> None:
    (group,) = group_tables([table(halves("b"), SGD), table(whole("a"), SGD)], CPU)
    assert [str(shard) for shard in group.local_shards(0)] == ["b[0:5, 0:4] on rank 0", "a[0:5, 0:8] on rank 0"]
    assert [str(shard) for shard in group.local_shards(1)] == ["b[0:5, 4:8] on rank 1"]
    assert group.local_shards(2) == ()


HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    ("device", "optimizer", "modes"),
    [
        ("cpu", SGD, {torch.float32: GroupMode.FUSED, HALF: GroupMode.ROWS, BRAIN: GroupMode.ROWS}),
        ("cpu", ROWWISE, {torch.float32: GroupMode.FUSED, HALF: GroupMode.FUSED, BRAIN: GroupMode.ROWS}),
        ("cuda", SGD, {torch.float32: GroupMode.FUSED, HALF: GroupMode.FUSED, BRAIN: GroupMode.ROWS}),
        ("cuda", ADAM, {torch.float32: GroupMode.FUSED, HALF: GroupMode.ROWS, BRAIN: GroupMode.ROWS}),
        ("cpu", None, dict.fromkeys((torch.float32, HALF, BRAIN), GroupMode.DENSE)),
    ],
)
def test_a_group_for_each_dtype(
    device: str, optimizer: FusedOptimizer | None, modes: dict[torch.dtype, GroupMode]
) -> None:
    """And fbgemm's own backward only where it is exact; see the note in ``lookup/fbgemm_kernel.py``."""
    tables = [table(whole(f"{dtype} {number}"), optimizer, dtype) for number in range(2) for dtype in modes]
    groups = group_tables(tables, torch.device(device))
    assert {group.dtype: group.mode for group in groups} == modes
    assert [[layout.name for layout in group.layouts] for group in groups] == [
        [f"{dtype} 0", f"{dtype} 1"] for dtype in modes
    ]


class TestOptimizersThatCountSteps:
    """fbgemm's CPU build has no Adam, so a kernel of SGD stands for one here."""

    def lookup(self) -> ShardLookup:
        layout = whole("a")
        groups = group_tables([table(layout, SGD)], CPU)
        route = build_route([Lookup(feature="f", layout=layout, group=0, output="f", mean=False)], 1, 1)
        found = ShardLookup(groups, route.slots[0], LocalCollectives(), CPU)
        found.weight(layout.shards[0]).fill_(1.0)
        (member,) = found._local_groups
        member.group = replace(member.group, optimizer=ADAM)
        return found

    def test_one_that_serves_updates_nothing(self) -> None:
        found = self.lookup()
        lookups, _ = found.scripted()
        module = torch.jit.script(lookups[0])
        rows = module(torch.tensor([0, 3, 3]), torch.tensor([[1, 2]], dtype=torch.int32), None)
        assert torch.equal(rows, torch.tensor([[1.0], [2.0]]).expand(2, 8))
        assert not rows.requires_grad
