"""Mean squares of rows whose columns are on several ranks, against the whole row."""

from __future__ import annotations

from random import Random

import torch
from hypothesis import given
from torch import Tensor

from shardrec.layout import COLUMN_UNIT, Shard, TableLayout
from shardrec.lookup.group_shards import RowGradient, TableBank
from shardrec.lookup.whole_rows import WholeRows, transfers
from tests.plans import random_layout, randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks

CPU = torch.device("cpu")


def random_layouts(rng: Random, world_size: int) -> list[TableLayout]:
    found = []
    for number in range(rng.randint(1, 3)):
        rows, dim = rng.randint(1, 9), COLUMN_UNIT * rng.randint(1, 4)
        found.append(random_layout(rng, f"t{number}", rows, dim, world_size, replicas=False))
    return found


@given(rng=randoms())
def test_each_shard_hears_of_its_rows_from_every_other_stripe(rng: Random) -> None:
    layouts = random_layouts(rng, 4)
    for layout in layouts:
        for target in layout.shards:
            heard: dict[int, list[int]] = {}
            for one in transfers([layout]):
                if one.target == target:
                    assert one.source.col_start != target.col_start
                    assert one.source.row_start <= one.row_start < one.row_end <= one.source.row_end
                    heard.setdefault(one.source.col_start, []).extend(range(one.row_start, one.row_end))
            others = {stripe.col_start for stripe in layout.stripes()} - {target.col_start}
            assert set(heard) == others
            assert all(sorted(rows) == list(range(target.row_start, target.row_end)) for rows in heard.values())


@given(rng=randoms())
def test_transfers_do_not_depend_on_the_order_of_the_shards(rng: Random) -> None:
    layout = random_layouts(rng, 4)[0]
    shuffled = list(layout.shards)
    rng.shuffle(shuffled)
    other = TableLayout(
        name=layout.name,
        num_embeddings=layout.num_embeddings,
        embedding_dim=layout.embedding_dim,
        shards=tuple(shuffled),
    )
    assert transfers([layout]) == transfers([other])


@given(rng=randoms())
def test_mean_squares_are_those_of_the_whole_row(rng: Random) -> None:
    world_size = rng.randint(1, 4)
    layouts = random_layouts(rng, world_size)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    touched = {
        layout.name: sorted(rng.sample(range(layout.num_embeddings), rng.randint(0, layout.num_embeddings)))
        for layout in layouts
    }
    gradients = {
        layout.name: torch.randn(layout.num_embeddings, layout.embedding_dim, generator=generator) for layout in layouts
    }

    def rank_main(collectives: ThreadCollectives) -> dict[tuple[str, int, int], Tensor]:
        local = [shard for layout in layouts for shard in layout.on_rank(collectives.rank)]
        if not local:
            assert WholeRows(layouts, local, None, collectives, CPU).mean_squares([]) == []
            return {}
        bank = TableBank([(shard.rows, shard.cols) for shard in local], range(len(local)), None, CPU)
        whole_rows = WholeRows(layouts, local, bank, collectives, CPU)
        parts = [gradient_of(bank, index, local) for index in range(len(bank.classes))]
        found = whole_rows.mean_squares([part for part, _ in parts])
        assert collectives.issued == ["row norm"]
        assert collectives.unwaited == []
        return {
            (shard.table, shard.col_start, row): value
            for (_, places), values in zip(parts, found, strict=True)
            for (shard, row), value in zip(places, values, strict=True)
        }

    def gradient_of(bank: TableBank, index: int, local: list[Shard]) -> tuple[RowGradient, list[tuple[Shard, int]]]:
        cls = bank.classes[index]
        rows, values, places = [], [torch.zeros(0, cls.width)], []
        for position, table in enumerate(cls.tables):
            shard = local[table]
            for row in touched[shard.table]:
                if shard.row_start <= row < shard.row_end:
                    rows.append(cls.bases[position] + row - shard.row_start)
                    values.append(gradients[shard.table][row : row + 1, shard.col_start : shard.col_end])
                    places.append((shard, row))
        return RowGradient(rows=torch.tensor(rows, dtype=torch.int64), values=torch.cat(values)), places

    results = thread_ranks(world_size, rank_main)
    everything = {key: value for found in results for key, value in found.items()}
    for layout in layouts:
        expected = gradients[layout.name].square().mean(dim=1)
        for row in touched[layout.name]:
            values = {float(everything[layout.name, stripe.col_start, row]) for stripe in layout.stripes()}
            assert len(values) == 1, "every stripe's copy is the same to the last bit"
            assert abs(values.pop() - float(expected[row])) < 1e-5
