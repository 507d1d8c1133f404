"""The bytes that a step sends are those of the closed formula, for each exchange and each pair of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.harness.counting import CountingCollectives, Sent
from benchmarks.harness.module import total_of
from benchmarks.harness.traffic import counted_traffic
from benchmarks.harness.volume import (
    EXCHANGES,
    CollectionTraffic,
    TableTraffic,
    Volume,
    header_columns,
    row_edges,
    step_volume,
    uniform_traffic,
)
from shardrec.exchange.batch import Expectation
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from shardrec.step.begin import begin
from shardrec.step.context import ExchangeOptions, ModelContext
from shardrec.step.id_exchange import exchange_ids
from shardrec.step.input_plan import InputPlan
from tests.batches import random_bags, random_sizes_bags
from tests.exchange.lookups import random_case
from tests.models import OPTIMIZERS, apply_optimizer_in_backward, collection, feature_rows, random_configs, table_sizes
from tests.plans import random_plan, random_topology, randoms
from tests.thread_ranks import ThreadCollectives, thread_ranks

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A collection of a random model, and a batch of it for each rank.

    Args:
        path: in the model.
        configs: of its tables.
        optimizers: a key of ``OPTIMIZERS`` per table.
        batches: per rank.
        pooled: EmbeddingBagCollection, else EmbeddingCollection.
        weighted: ids come with weights.
        learned: the weights take a gradient.
        dedup: of the sequences.
        seed: of the first values.
    """

    path: str
    configs: Sequence[Any]
    optimizers: Sequence[str]
    batches: Sequence[KeyedJaggedTensor]
    pooled: bool
    weighted: bool = False
    learned: bool = False
    dedup: bool = False
    seed: int = 0

    def with_optimizer(self, name: str) -> Member:
        return replace(self, optimizers=[name] * len(self.configs))

    def build(self, plan: ShardingPlan, context: ModelContext) -> Any:
        if self.pooled:
            bags = collection(self.configs, weighted=self.weighted, optimizers=self.optimizers, seed=self.seed)
            return ShardedEmbeddingBagCollection(bags, plan, path=self.path, context=context)
        module = EmbeddingCollection(tables=list(self.configs))
        for config, name in zip(self.configs, self.optimizers, strict=True):
            choice = OPTIMIZERS[name]
            if choice.optimizer is not None:
                parameters = module.embeddings[config.name].parameters()
                apply_optimizer_in_backward(choice.optimizer, parameters, dict(choice.settings))
        return ShardedEmbeddingCollection(module, plan, path=self.path, context=context, dedup=self.dedup)

    def traffic(self, plan: ShardingPlan) -> CollectionTraffic:
        """From the plan and the ids."""
        tables = []
        # A key that no table looks up has no part in what is sent, whatever its batch size.
        features = feature_rows(self.configs)
        strides = [
            {key: size for key, size in zip(batch.keys(), batch.stride_per_key(), strict=True) if key in features}
            for batch in self.batches
        ]
        uneven = [len(set(sizes.values())) > 1 and self.pooled for sizes in strides]
        for config, optimizer in zip(self.configs, self.optimizers, strict=True):
            layout = plan.by_name[f"{self.path}.{config.name}"]
            tables.append(
                counted_traffic(
                    layout,
                    [[batch[feature].values() for feature in config.feature_names] for batch in self.batches],
                    distinct=self.dedup,
                    whole_rows=optimizer == "rowwise_adagrad" and len(layout.stripes()) > 1,
                    bags=[
                        sum(sizes[feature] for feature in config.feature_names) if is_uneven else None
                        for sizes, is_uneven in zip(strides, uneven, strict=True)
                    ],
                )
            )
        return CollectionTraffic(
            tables=tables,
            batch_sizes=[max(sizes.values()) for sizes in strides],
            pooled=self.pooled,
            weighted=self.weighted,
            learned=self.learned,
        )


def random_bag_member(rng: Random, path: str, world_size: int) -> Member:
    weighted = rng.random() < 0.4
    configs = random_configs(rng, weighted=weighted, most=3)
    rows = feature_rows(configs)
    learned = False
    if rng.random() < 0.3:
        batches = [
            random_sizes_bags(rng, rows, weighted=weighted, even=rng.random() < 0.3).features for _ in range(world_size)
        ]
    else:
        batches = [random_bags(rng, rows, rng.randrange(5), weighted=weighted).kjt() for _ in range(world_size)]
        learned = weighted and rng.random() < 0.5
    return Member(
        path=path,
        configs=configs,
        optimizers=[rng.choice(sorted(OPTIMIZERS)) for _ in configs],
        batches=batches,
        pooled=True,
        weighted=weighted,
        learned=learned,
        seed=rng.randrange(99),
    )


def random_sequence_member(rng: Random, path: str, world_size: int) -> Member:
    dim = 4 * rng.randint(1, 4)
    configs = [
        EmbeddingConfig(
            name=f"s{number}",
            num_embeddings=rng.choice([1, 7, 29]),
            embedding_dim=dim,
            feature_names=rng.sample("abcd", rng.choice([1, 1, 2])),
        )
        for number in range(rng.randint(1, 3))
    ]
    return Member(
        path=path,
        configs=configs,
        optimizers=[rng.choice(sorted(OPTIMIZERS)) for _ in configs],
        batches=[random_bags(rng, feature_rows(configs), rng.randrange(5)).kjt() for _ in range(world_size)],
        pooled=False,
        dedup=rng.random() < 0.5,
    )


def fits(member: Member, plan: ShardingPlan) -> bool:
    """Rowwise Adagrad on sequences takes stripes of one width."""
    widths = [len({shard.cols for shard in plan.by_name[f"{member.path}.{one.name}"].shards}) for one in member.configs]
    cut = zip(member.optimizers, widths, strict=True)
    return member.pooled or not any(name == "rowwise_adagrad" and count > 1 for name, count in cut)


def with_leaf(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch with weights that take a gradient."""
    return KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        lengths=features.lengths(),
        weights=features.weights().clone().requires_grad_(),
        stride=features.stride(),
    )


def run_step(
    members: Sequence[Member], plan: ShardingPlan, comms: QuantizedComms, *, train: bool
) -> tuple[Volume, int]:
    """What one step of all the collections in one exchange sends, and the columns of its header."""

    def rank_main(threads: ThreadCollectives) -> tuple[Sent, list[int]]:
        counting = CountingCollectives(threads)
        context = ModelContext(counting, CPU, ExchangeOptions(comms=comms))
        context.gradients.are_reduced = True  # they are not, but what a reducer sends is no part of this
        modules = [member.build(plan, context) for member in members]
        batches = [member.batches[threads.rank] for member in members]
        features = [with_leaf(one) if member.learned else one for member, one in zip(members, batches, strict=True)]
        with torch.set_grad_enabled(train), context.step.forward():
            outputs = [module(one) for module, one in zip(modules, features, strict=True)]
        total = torch.stack([total_of(output) for output in outputs]).sum()
        if train:
            total.backward()
        assert threads.unwaited == []
        return counting.take(), [len(module.shards._local_groups) for module in modules]

    found = thread_ranks(plan.world_size, rank_main)
    assert set().union(*(sent.bytes for sent, _ in found)) <= set(EXCHANGES)
    return volume_of([sent for sent, _ in found], plan.topology), header_columns(found[0][1])


def volume_of(sent: Sequence[Sent], topology: Topology) -> Volume:
    nothing = [0] * len(sent)
    return Volume.of(topology.ranks_per_host, len(sent), lambda name, p, q: sent[p].bytes.get(name, nothing)[q])


@example(rng=Random(150))  # a key that no table looks up has another batch size
@given(rng=randoms())
def test_a_step_sends_what_the_formula_says(rng: Random) -> None:
    """Any plan, several collections, pooled and not, weights, batch sizes per feature, optimizers, formats."""
    topology = random_topology(rng, most_ranks=5)
    makers = rng.choices([random_bag_member, random_sequence_member], k=rng.choice([1, 1, 2, 3]))
    members = [maker(rng, f"c{number}", topology.world_size) for number, maker in enumerate(makers)]
    tables = {name: size for member in members for name, size in table_sizes(member.configs, member.path).items()}
    plan = random_plan(rng, tables, topology)
    members = [member if fits(member, plan) else member.with_optimizer("sgd") for member in members]
    formats: Any = ["fp32", "fp32", "fp16", "bf16", "int8"]
    comms = QuantizedComms(output=rng.choice(formats), gradient=rng.choice(formats))
    train = rng.random() < 0.8
    found, columns = run_step(members, plan, comms, train=train)
    expected = step_volume(
        [member.traffic(plan) for member in members], topology, columns=columns, comms=comms, train=train
    )
    assert list(found.differences(expected)) == []


@given(rng=randoms())
def test_ids_that_need_64_bits(rng: Random) -> None:
    """Header and payload of tables too large to make."""
    case = random_case(rng, huge=True)
    world_size = case.plan.world_size
    weighted = rng.random() < 0.4
    batches = [random_bags(rng, case.rows, rng.randrange(4), weighted=weighted).kjt() for _ in range(world_size)]

    def rank_main(threads: ThreadCollectives) -> Sent:
        counting = CountingCollectives(threads)
        context = ModelContext(counting, CPU)
        lookups = tuple((one.feature, one.layout.name, one.layout.num_embeddings) for one in case.lookups)
        input = InputPlan(case.route, Expectation(tables=lookups, weighted=weighted, device=CPU), context.headers)
        call = begin(input, batches[threads.rank], "")
        exchange_ids(context.headers, [call])
        call.wait_for_ids()
        return counting.take()

    found = volume_of(thread_ranks(world_size, rank_main), case.plan.topology)
    features = {table: [one.feature for one in case.lookups if one.layout.name == table] for table in case.plan.by_name}
    tables = [
        counted_traffic(layout, [[batch[feature].values() for feature in features[name]] for batch in batches])
        for name, layout in case.plan.by_name.items()
    ]
    sizes = [batch.stride() for batch in batches]
    expected = step_volume(
        [CollectionTraffic(tables=tables, batch_sizes=sizes, weighted=weighted)],
        case.plan.topology,
        columns=header_columns([case.route.groups]),
    )
    for exchange in ("header", "payload"):
        assert found.pairs[exchange] == expected.pairs[exchange]


def test_by_hand() -> None:
    """Two hosts of two ranks; a table by rows on host 0, and one by columns on ranks 1 and 2."""
    topology = Topology(hosts=2, ranks_per_host=2)
    rows = cuts.table_row_wise("rows", 10, 8, host=0, topology=topology)
    columns = cuts.column_wise("columns", 6, 8, ranks=[1, 2])
    tables = [
        TableTraffic(layout=rows, lookups=1, ids=[(2, 1)] * 4),
        TableTraffic(layout=columns, lookups=2, ids=[(5,)] * 4, rows=(3,), whole_rows=True),
    ]
    traffic = CollectionTraffic(tables=tables, batch_sizes=[10, 20, 30, 40])
    found = step_volume([traffic], topology, columns=10).pairs
    assert found["header"] == ((0, 80, 80, 80), (80, 0, 80, 80), (80, 80, 0, 80), (80, 80, 80, 0))
    # To rank 0 a slot and 2 ids, to rank 1 three slots and 1 + 5 ids, to rank 2 two slots and 5 ids.
    assert found["payload"][0] == (0, 4 * (3 * 10 + 6), 4 * (2 * 10 + 5), 0)
    assert found["payload"][3] == (4 * (40 + 2), 4 * (3 * 40 + 6), 4 * (2 * 40 + 5), 0)
    # Eight columns for the samples of ranks 1 and 3, and of ranks 0 and 2, who add them up.
    assert found["partial sums"] == ((0, 32 * 60, 0, 0), (32 * 40, 0, 0, 0), (0,) * 4, (0,) * 4)
    # From ranks 0 and 1 the sums, to the rank of the same place; from ranks 1 and 2 four columns for each lookup.
    assert found["output"][0] == (0, 0, 32 * 30, 0)
    assert found["output"][1] == (32 * 10, 0, 32 * 30, 32 * 40 + 32 * 40)
    assert found["output"][2] == (32 * 10, 32 * 20, 0, 32 * 40)
    assert found["gradient"][0] == (0, 32 * 10 + 32 * 40, 32 * 10, 0)
    assert found["gradient"][3] == (0, 32 * 40 + 32 * 40, 32 * 40, 0)
    assert found["row norm"] == ((0,) * 4, (0, 0, 12, 0), (0, 12, 0, 0), (0,) * 4)
    assert found["weight gradient"] == ((0,) * 4,) * 4
    forward = step_volume([traffic], topology, columns=10, train=False).pairs
    assert forward["gradient"] == forward["row norm"] == ((0,) * 4,) * 4


class TestUniform:
    """Expected numbers for ids drawn uniformly."""

    @settings(max_examples=6)
    @given(rng=randoms())
    def test_expectation_is_the_mean_over_draws(self, rng: Random) -> None:
        plan = random_plan(rng, {"t": (rng.choice([1, 2, 9]), 8)}, Topology(ranks_per_host=2))
        (layout,) = plan.tables
        draws = 400
        counts = [rng.randrange(6), rng.randrange(6)]
        distinct = rng.random() < 0.5
        expected = uniform_traffic(layout, counts, distinct=distinct, whole_rows=True)
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        ids = torch.zeros(2, len(row_edges(layout)) - 1)
        rows = torch.zeros(ids.size(1))
        for _ in range(draws):
            drawn = [[torch.randint(layout.num_embeddings, (count,), generator=generator)] for count in counts]
            found = counted_traffic(layout, drawn, distinct=distinct, whole_rows=True)
            ids += torch.tensor(found.ids)
            rows += torch.tensor(found.rows)
        # A mean of 400 numbers below 6 (10 for all ranks) is within six of its standard deviations.
        assert torch.allclose(ids / draws, torch.tensor(expected.ids, dtype=torch.float32), atol=6 * 2.5 / 20)
        assert torch.allclose(rows / draws, torch.tensor(expected.rows, dtype=torch.float32), atol=6 * 2.5 / 20)

    def test_known_numbers(self) -> None:
        layout = cuts.row_wise("t", 4, 8, ranks=[0, 1])
        found = uniform_traffic(layout, [2, 0], lookups=3, distinct=True)
        assert found.lookups == 1
        # Two draws from four rows meet 4 (1 - (3/4)²) = 7/4 of them.
        assert found.ids == (pytest.approx((7 / 8, 7 / 8)), (0, 0))
        assert uniform_traffic(layout, [2, 0], lookups=3).ids == ((1, 1), (0, 0))


class TestCounting:
    """Bytes by element size and columns; nothing for what a rank keeps."""

    def test_counts(self) -> None:
        def rank_main(threads: ThreadCollectives) -> list[Sent]:
            counting = CountingCollectives(threads)
            assert (counting.rank, counting.world_size) == (threads.rank, 2)
            for values, what in [
                (torch.zeros(3, 5, dtype=torch.int64), "header"),
                (torch.zeros(3, dtype=torch.uint8), "output"),
                (torch.zeros(3, 2, dtype=torch.float16), "output"),
            ]:
                parts = [[part.flatten()] for part in values.split([1, 2])]
                counting.send(parts, [parts[threads.rank][0].numel()] * 2, what).wait()
            return [counting.take(), counting.take()]

        (first, second), (other, _) = thread_ranks(2, rank_main)
        assert first.bytes == {"header": [0, 80], "output": [0, 2 + 8]}
        assert other.bytes == {"header": [40, 0], "output": [1 + 4, 0]}
        assert first.calls == {"header": 1, "output": 2}
        assert (second.bytes, second.calls) == ({}, {})
