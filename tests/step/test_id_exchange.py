"""The input exchange between ranks, against the same routing id by id."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given

from shardrec.errors import InputError
from shardrec.exchange.batch import Expectation
from shardrec.exchange.payload import ShardInput
from shardrec.step.begin import begin
from shardrec.step.context import ModelContext
from shardrec.step.id_exchange import exchange_ids
from shardrec.step.input_plan import InputPlan
from tests.batches import Bags, random_bags
from tests.exchange.lookups import Case, random_case
from tests.plans import randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks

CPU = torch.device("cpu")


class Exchange:
    """The input exchange of one module by itself."""

    def __init__(self, case: Case, collectives: ThreadCollectives, *, weighted: bool) -> None:
        tables = tuple((one.feature, one.layout.name, one.layout.num_embeddings) for one in case.lookups)
        expect = Expectation(tables=tables, weighted=weighted, device=CPU)
        self.context = ModelContext(collectives, CPU)
        self.input = InputPlan(case.route, expect, self.context.headers)

    def __call__(self, features: object, agreement: str) -> ShardInput:
        call = begin(self.input, features, agreement)
        exchange_ids(self.context.headers, [call])
        return call.wait_for_ids()


def exchange_of(case: Case, collectives: ThreadCollectives, *, weighted: bool) -> Exchange:
    return Exchange(case, collectives, weighted=weighted)


def expected_input(case: Case, rank: int, batches: list[Bags]) -> tuple[list[list[int]], list[int], list[float]]:
    """Lengths (S, B_all), ids and weights that ``rank`` must receive."""
    lengths, ids, weights = [], [], []
    for slot in case.route.slots[rank]:
        feature = case.lookups[slot.lookup].feature
        row = []
        for batch in batches:
            for sample, bag in enumerate(batch.ids[feature]):
                here = [place for place, one in enumerate(bag) if slot.shard.row_start <= one < slot.shard.row_end]
                row.append(len(here))
                ids += [bag[place] - slot.shard.row_start for place in here]
                if batch.weights is not None:
                    weights += [batch.weights[feature][sample][place] for place in here]
        lengths.append(row)
    return lengths, ids, weights


def assert_received(case: Case, rank: int, got: ShardInput, batches: list[Bags], *, weighted: bool) -> None:
    lengths, ids, weights = expected_input(case, rank, batches)
    assert got.lengths.dtype == torch.int32
    assert got.lengths.shape == (len(lengths), sum(batch.size for batch in batches))
    assert got.lengths.tolist() == lengths
    assert got.ids.tolist() == ids
    assert got.batch_sizes == tuple(batch.size for batch in batches)
    per_group = [0] * case.route.groups
    for slot, row in zip(case.route.slots[rank], lengths, strict=True):
        per_group[slot.group] += sum(row)
    assert got.group_ids == tuple(per_group)
    if weighted:
        assert got.weights is not None
        assert got.weights.tolist() == weights
    else:
        assert got.weights is None


@given(rng=randoms())
def test_every_slot_receives_its_ids_in_order(rng: Random) -> None:
    case = random_case(rng, huge=True)
    weighted = rng.random() < 0.4
    id_dtype = torch.int64 if max(case.rows.values()) > 2**31 - 1 else rng.choice([torch.int32, torch.int64])
    length_dtype = rng.choice([torch.int32, torch.int64])
    world_size = case.plan.world_size
    steps = [
        [
            random_bags(rng, case.rows, rng.randrange(4), weighted=weighted, extra=rng.choice([(), ("x",), ("x", "y")]))
            for _ in range(world_size)
        ]
        for _ in range(2)
    ]

    def rank_main(collectives: ThreadCollectives) -> list[ShardInput]:
        exchange = exchange_of(case, collectives, weighted=weighted)
        received = []
        for batches in steps:
            features = batches[collectives.rank].kjt(id_dtype, length_dtype)
            received.append(exchange(features, ""))
        assert collectives.issued == (["header", "payload"] * len(steps) if world_size > 1 else [])
        assert collectives.unwaited == []
        return received

    for rank, received in enumerate(thread_ranks(world_size, rank_main)):
        for got, batches in zip(received, steps, strict=True):
            assert_received(case, rank, got, batches, weighted=weighted)


@given(rng=randoms())
def test_strided_tensors_are_read_right(rng: Random) -> None:
    """Ids, lengths and weights that are every second entry of a longer tensor."""
    case = random_case(rng)
    weighted = rng.random() < 0.5
    id_dtype = rng.choice([torch.int32, torch.int64])
    batches = [random_bags(rng, case.rows, rng.randint(1, 3), weighted=weighted) for _ in range(case.plan.world_size)]

    def spread(values: torch.Tensor) -> torch.Tensor:
        strided = torch.stack([values, torch.full_like(values, 77)], dim=1).flatten()[::2]
        assert values.numel() < 2 or not strided.is_contiguous()
        return strided

    def rank_main(collectives: ThreadCollectives) -> ShardInput:
        exchange = exchange_of(case, collectives, weighted=weighted)
        features = batches[collectives.rank].kjt(id_dtype)
        features = type(features)(
            keys=features.keys(),
            values=spread(features.values()),
            lengths=spread(features.lengths()),
            weights=spread(features.weights()) if weighted else None,
        )
        return exchange(features, "")

    for rank, got in enumerate(thread_ranks(case.plan.world_size, rank_main)):
        assert_received(case, rank, got, batches, weighted=weighted)


@given(rng=randoms())
def test_the_users_tensors_are_left_alone(rng: Random) -> None:
    case = random_case(rng, most_ranks=2)
    weighted = rng.random() < 0.5
    batches = [random_bags(rng, case.rows, rng.randint(0, 3), weighted=weighted) for _ in range(case.plan.world_size)]
    id_dtype = rng.choice([torch.int32, torch.int64])

    def rank_main(collectives: ThreadCollectives) -> None:
        features = batches[collectives.rank].kjt(id_dtype)
        tensors = [features.values(), features.lengths(), *([features.weights()] if weighted else [])]
        before = [(tensor.clone(), tensor._version) for tensor in tensors]
        exchange = exchange_of(case, collectives, weighted=weighted)
        received = exchange(features, "")
        for tensor, (copy, version) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, copy)
            assert tensor._version == version
        received.ids.fill_(-1)
        received.lengths.fill_(-1)
        for tensor, (copy, _) in zip(tensors, before, strict=True):
            assert torch.equal(tensor, copy), "the exchange gave out the user's own memory"

    thread_ranks(case.plan.world_size, rank_main)


# ----------------------------------------------------------------------------------------------------------- faults


def spoil(rng: Random, case: Case, bags: Bags) -> tuple[Bags, str]:
    """The batch with one id out of its table, and what the message has to say of it."""
    ids = {key: [list(bag) for bag in bags.ids[key]] for key in bags.keys}
    feature = rng.choice(sorted(case.rows))
    sample = rng.randrange(bags.size)
    rows = case.rows[feature]
    bad = rng.choice([-1, rows, rows + 3, -(2**31), 2**31 - 1, 2**40])
    ids[feature][sample] = [bad]
    weights = bags.weights
    if weights is not None:
        weights = {key: [[1.0] * len(bag) for bag in ids[key]] for key in bags.keys}
    smallest = min((one.layout.num_embeddings, one.layout.name) for one in case.lookups if one.feature == feature)
    words = (
        f"feature {feature!r} of table {smallest[1]!r}: id {bad} in sample {sample} is outside [0, {rows}). Hash or "
        "clip the ids into the table, or raise num_embeddings"
    )
    return Bags(keys=bags.keys, size=bags.size, ids=ids, weights=weights), words


@given(rng=randoms())
def test_a_bad_id_stops_every_rank_at_the_same_step(rng: Random) -> None:
    case = random_case(rng)
    world_size = case.plan.world_size
    weighted = rng.random() < 0.3
    extra = rng.choice([(), ("x",)])
    good, bad = (
        [random_bags(rng, case.rows, rng.randint(1, 3), weighted=weighted, extra=extra) for _ in range(world_size)]
        for _ in range(2)
    )
    guilty = sorted(rng.sample(range(world_size), rng.randint(1, world_size)))
    words = {}
    for rank in guilty:
        bad[rank], words[rank] = spoil(rng, case, bad[rank])

    def rank_main(collectives: ThreadCollectives) -> tuple[str, ShardInput]:
        exchange = exchange_of(case, collectives, weighted=weighted)
        exchange(good[collectives.rank].kjt(), "")
        with pytest.raises(InputError) as caught:
            exchange(bad[collectives.rank].kjt(), "")
        assert collectives.unwaited == []
        return str(caught.value), exchange(good[collectives.rank].kjt(), "")

    results = thread_ranks(world_size, rank_main)
    assert len({message for message, _ in results}) == 1
    lines = [f"rank {rank}: {words[rank]}" for rank in guilty]
    whole = lines[0] if len(lines) == 1 else f"{len(lines)} ranks have bad input:\n  " + "\n  ".join(lines)
    assert results[0][0] == whole
    for rank, (_, received) in enumerate(results):
        assert_received(case, rank, received, good, weighted=weighted)


@given(rng=randoms())
def test_ranks_that_disagree_are_told_apart(rng: Random) -> None:
    case = random_case(rng)
    world_size = case.plan.world_size
    batches = [random_bags(rng, case.rows, 2) for _ in range(world_size)]
    odd = rng.randrange(world_size)
    by_dtype = rng.random() < 0.5

    def rank_main(collectives: ThreadCollectives) -> str:
        exchange = exchange_of(case, collectives, weighted=False)
        differs = collectives.rank == odd
        id_dtype = torch.int32 if by_dtype and differs else torch.int64
        mode = "gradients off" if not by_dtype and differs else "gradients on"
        features = batches[collectives.rank].kjt(id_dtype)
        if world_size == 1:
            exchange(features, mode)
            return ""
        with pytest.raises(InputError) as caught:
            exchange(features, mode)
        exchange(batches[collectives.rank].kjt(), "")
        return str(caught.value)

    messages = set(thread_ranks(world_size, rank_main))
    assert len(messages) == 1
    for rank in range(world_size if world_size > 1 else 0):
        ids = "ids int32" if rank == odd else "ids int64"
        mode = "gradients off" if rank == odd else "gradients on"
        assert f"\n  rank {rank}: {ids if by_dtype else mode}\n" in f"{min(messages)}\n"
