"""Served models: the rows that an uncut table would have, eager mode's numbers in TorchScript, on 1, 2 and 4 ranks."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingCollection

import shardrec
from shardrec.errors import ConfigError, InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import shard
from shardrec.serve import ServedModel, WeightFormat, quantize
from shardrec.serve.row_bytes import encode
from tests.batches import Bags, random_bags
from tests.cuda_ranks import DEVICES, WORLDS, cuda_ranks
from tests.models import collection, feature_rows, table_sizes
from tests.plans import random_plan, topologies_of
from tests.ranks import raises_on_all, ranks
from tests.scripting.scorers import Reader, Scorer
from tests.serve.served import click_scorer, decode, on_grid, pooled_columns, served_rows, some_plan

FORMATS = [form.value for form in WeightFormat]
CUTS = [None, "column_wise", "row_wise_uneven", "grid", "data_parallel"]


def check_rows(served: ServedModel, whole: dict[str, Tensor], where: str) -> None:
    """Each part is that of the whole table's rows."""
    for name, rows, columns, found in served_rows(served):
        form = served.formats[name]
        expected = decode(encode(whole[name], form), form)[rows, columns]
        assert torch.equal(found, expected), f"{name}, {where}"


def compare(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    weighted = rng.random() < 0.3
    # Where hosts add up rows of their own first, eager sums come in another order than scripted ones.
    topology = Topology(ranks_per_host=world_size)
    model, configs, whole = click_scorer(rng, topology, cut=rng.choice(CUTS), weighted=weighted)
    weights = rng.choice(FORMATS)
    mixed = {f"sparse.{configs[0].name}": rng.choice(FORMATS)}
    served = quantize(model, weights, tables=mixed)
    where = f"seed {seed}, {weights}, {mixed}: {model.plan}"
    check_rows(served, whole, where)
    scripted = shardrec.script(served)
    for _ in range(2):
        bags = [random_bags(rng, feature_rows(configs), rng.randrange(4), weighted=weighted) for _ in range(world_size)]
        features = bags[rank].kjt(rng.choice([torch.int32, torch.int64]))
        found = served(features)
        assert not found.requires_grad
        with torch.no_grad():
            assert torch.equal(scripted(features), found), where
            if set(mixed.values()) | {weights} == {"fp32"}:
                assert torch.allclose(found, model(features), atol=1e-6), where


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 4))])
def test_rows_are_the_whole_tables_and_scripted_is_eager_exactly(world_size: int, seed: int) -> None:
    ranks(world_size, compare, seed)


def answers(seed: int, weights: str) -> list[Tensor]:
    """This rank's pooled outputs of a model whose tables any format keeps exactly: of every W-th of four batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng, plan_rng = Random(seed), Random(100 + seed)
    weighted = rng.random() < 0.5
    topology = plan_rng.choice(topologies_of(world_size))
    model, configs, _ = click_scorer(rng, topology, weighted=weighted, grid=True, plan_rng=plan_rng)
    bags = [random_bags(rng, feature_rows(configs), 3, weighted=weighted) for _ in range(4)]
    pooled = quantize(model, weights).sparse
    own = [one.kjt() for one in bags[rank::world_size]]
    found = [pooled(one).values() for one in own]
    assert not any(one.requires_grad for one in found)
    if seed == 0:  # other seeds: test_rows_are_the_whole_tables_and_scripted_is_eager_exactly
        scripted = shardrec.script(pooled)
        with torch.no_grad():
            assert all(torch.equal(scripted(one).values(), other) for one, other in zip(own, found, strict=True))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize(("seed", "weights"), enumerate(FORMATS))
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_many_ranks_answer_exactly_what_one_does(world_size: int, seed: int, weights: str) -> None:
    alone = ranks(1, answers, seed, weights)[0]
    together = ranks(world_size, answers, seed, weights)
    for rank, found in enumerate(together):
        for one, other in zip(found, alone[rank::world_size], strict=True):
            assert torch.equal(one, other), f"rank {rank}"


TABLES = [
    EmbeddingConfig(name="t0", num_embeddings=13, embedding_dim=16, feature_names=["a"]),
    EmbeddingConfig(name="t1", num_embeddings=7, embedding_dim=16, feature_names=["b", "c"]),
]


def compare_sequences(seed: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    rng = Random(seed)
    torch.manual_seed(0)
    words = EmbeddingCollection(tables=TABLES)
    whole = {f"words.{name}": module.weight.detach().clone() for name, module in words.embeddings.items()}
    sizes = {f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in TABLES}
    plan = random_plan(rng, sizes, Topology(ranks_per_host=world_size))
    if seed == 0:  # replicated tables, too, of which the second is looked up twice
        plan = replace(plan, tables=tuple(cuts.data_parallel(name, *size) for name, size in sizes.items()))
    model = shard(Reader(words, 16), plan, dedup=rng.random() < 0.5).eval()
    weights = rng.choice(FORMATS)
    served = quantize(model, weights)
    where = f"seed {seed}, {weights}: {plan}"
    check_rows(served, whole, where)
    bags = [random_bags(rng, {"a": 13, "b": 7, "c": 7}, rng.randrange(4)) for _ in range(world_size)][rank]
    features = bags.kjt()
    pending = served.words(features)
    tables = {"a": "t0", "b": "t1", "c": "t1"}
    for key, table in tables.items():
        form = WeightFormat(weights)
        ids = torch.tensor([one for bag in bags.ids[key] for one in bag], dtype=torch.int64)
        expected = decode(encode(whole[f"words.{table}"], form), form)[ids]
        assert torch.equal(pending[key].values(), expected), f"{key}, {where}"
    found = served(features)
    with torch.no_grad():
        scripted = shardrec.script(served)(features)
    assert all(torch.equal(scripted[key], found[key]) for key in found), where


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("world_size", "seeds"), [(1, 2), (2, 2), *(pytest.param(size, 6, marks=pytest.mark.slow) for size in (1, 2))]
)
def test_sequences_are_the_tables_rows_exactly(world_size: int, seeds: int) -> None:
    def rank_main() -> None:
        for seed in range(seeds):
            compare_sequences(seed)

    ranks(world_size, rank_main)


CUDA_TABLES = [
    EmbeddingBagConfig(name="t0", num_embeddings=13, embedding_dim=32, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=16, feature_names=["b"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(name="t2", num_embeddings=9, embedding_dim=16, feature_names=["c"]),
]
"""Of widths whose halves INT4's kernel takes."""


def serve_on_cuda(weights: str) -> None:
    """Beside the same model on the CPU: rows to the last bit, and sums, which are exact in any order."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    topology = Topology(ranks_per_host=world_size)
    for cut in CUTS[1:]:
        served = []
        for device in ("cpu", "cuda"):
            rng, bags = Random(cut), collection(CUDA_TABLES, optimizers="sgd")
            for bag in bags.embedding_bags.values():
                on_grid(bag.weight, rng)
            plan = some_plan(rng, table_sizes(CUDA_TABLES, "sparse"), topology, cut)
            model = shard(Scorer(bags, pooled_columns(CUDA_TABLES)), plan, device=device).eval()
            served.append(quantize(model, weights, tables={"sparse.t2": FORMATS[-1]}))
        for here, there in zip(*map(served_rows, served), strict=True):
            assert here[:3] == there[:3] and torch.equal(here[3], there[3].cpu()), f"{here[0]}, {cut}"
        scripted = shardrec.script(served[1].sparse)
        for size in (3, 0, 40):
            batches = [random_bags(rng, feature_rows(CUDA_TABLES), size) for _ in range(world_size)]
            features = batches[rank].kjt(rng.choice([torch.int32, torch.int64]))
            expected, moved = served[0].sparse(features).values(), features.to(served[1].context.device)
            for collection_ in (served[1].sparse, scripted):
                values = collection_(moved).values()
                assert values.is_cuda and torch.equal(values.cpu(), expected), cut
            assert torch.allclose(served[1](moved).cpu(), served[0](features), atol=1e-2), cut


def serve_sequences_on_cuda(weights: str) -> None:
    world_size = dist.get_world_size()
    features = random_bags(Random(dist.get_rank()), {"a": 13, "b": 7, "c": 7}, 5).kjt()
    for cut in ("row_wise_uneven", "column_wise", "data_parallel"):
        answers = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            words = EmbeddingCollection(tables=TABLES)
            sizes = {f"words.{one.name}": (one.num_embeddings, one.embedding_dim) for one in TABLES}
            plan = some_plan(Random(1), sizes, Topology(ranks_per_host=world_size), cut)
            served = quantize(shard(Reader(words, 16), plan, device=device).eval(), weights)
            moved = features.to(served.context.device)
            for model in (served.words, shardrec.script(served.words)):
                answers.append({key: one.values().cpu() for key, one in model(moved).items()})
        # fbgemm's CUDA kernel computes scale * code + bias in float16.
        most = 2**-10 if WeightFormat(weights).is_quantized else 1e-6
        for answer in answers[1:]:
            for key in "abc":
                worst = (answer[key] - answers[0][key]).abs().max()
                assert worst <= most * answers[0][key].abs().max(), f"{key}, {cut}: {worst}"


@pytest.mark.skipif(DEVICES == 0, reason="needs a CUDA device, and this machine has none")
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("weights", FORMATS)
def test_on_cuda(weights: str, world_size: int) -> None:
    cuda_ranks(world_size, serve_on_cuda, weights)
    cuda_ranks(world_size, serve_sequences_on_cuda, weights)


def small(rng: Random | None = None) -> tuple[Any, Bags]:
    """A model on this world's ranks, cut by columns, and a batch."""
    rng = rng or Random(3)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model, configs, _ = click_scorer(rng, Topology(ranks_per_host=world_size), cut="column_wise")
    return model, random_bags(Random(0), feature_rows(configs), 3)


def test_the_trained_model_goes_on_and_the_served_one_stays() -> None:
    def rank_main() -> None:
        model, bags = small()
        features = bags.kjt()
        before = model(features).detach()
        served = quantize(model, "fp32")
        answer = served(features)
        model.train()
        model(features).square().sum().backward()
        with torch.no_grad():
            for one in model.module.over.parameters():
                one.add_(1.0)
        assert not torch.equal(model(features), before), "the model trains"
        assert torch.equal(served(features), answer)
        assert torch.allclose(answer, before, atol=1e-6)

    ranks(2, rank_main)


def test_a_bad_batch_is_an_input_error_on_all_ranks() -> None:
    def rank_main() -> None:
        model, bags = small()
        served = quantize(model)
        bad = Bags(keys=bags.keys, size=3, ids={**bags.ids, bags.keys[0]: [[10**6], [], []]})
        features = bags.kjt()
        good = served(features)
        with pytest.raises(InputError, match=r"rank 1: feature .* id 1000000 in sample 0"):
            served(bad.kjt() if dist.get_rank() == 1 else features)
        assert torch.equal(served(features), good)

    ranks(2, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e5])
def test_a_value_that_a_format_cannot_keep_is_refused_on_all_ranks(value: float) -> None:
    def rank_main() -> None:
        model, _ = small()
        if dist.get_rank() == 1:
            next(iter(model.sparse.parameters())).data[0, 0] = value
        if value == 1e5:
            quantize(model, "fp32")
        quantize(model, "int8")

    raises_on_all(2, ConfigError, r"rank 1: table 't\d' has a value that int8 cannot keep", rank_main)


def test_what_is_wrong_is_named() -> None:
    model, _ = small()
    with pytest.raises(ConfigError, match=r"'int9'\. Tables are kept as one of 'fp32', 'fp16', 'int8', 'int4'"):
        quantize(model, "int9")
    with pytest.raises(ConfigError, match=r"names 'sparse.t99'. The model's tables are 'sparse.t0'"):
        quantize(model, tables={"sparse.t99": "int4"})
    with pytest.raises(ConfigError, match="not Linear: shard the model first"):
        quantize(nn.Linear(1, 1))  # type: ignore[arg-type]
    served = quantize(model)
    with pytest.raises(ConfigError, match="quantized already"):
        quantize(served)
    with pytest.raises(ConfigError, match=r"lacks a state_dict: save it with shardrec\.serve\.save"):
        served.state_dict()
    with pytest.raises(ConfigError, match=r"ServedModel cannot be copied"):
        copy.deepcopy(served)


def test_a_replica_quantizes_by_itself() -> None:
    def rank_main() -> str:
        rank, table = dist.get_rank(), cuts.row_wise("t0", 6, 8, ranks=(0, 1))
        configs = [EmbeddingBagConfig(name="t0", num_embeddings=6, embedding_dim=8, feature_names=["f0"])]
        bags, plan = collection(configs), ShardingPlan(topology=Topology(ranks_per_host=2), tables=(table,))
        with torch.no_grad():
            bags.embedding_bags["t0"].weight[3:] = torch.inf  # on the second rank of each replica
        model = shard(bags, plan, replicas=shardrec.Replicas(2)).eval()
        if rank < 2:
            return ""
        with pytest.raises(ConfigError) as caught:
            quantize(model)
        return str(caught.value)

    messages = ranks(4, rank_main)
    assert messages[:2] == ["", ""] and messages[2] == messages[3]
    assert re.match("rank 1: .*not finite", messages[3])


def test_smaller_formats_take_less_memory() -> None:
    model, _ = small()
    sizes = [quantize(model, weights).table_bytes() for weights in ("fp32", "fp16", "int8", "int4")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[1] * 2 == sizes[0]
    rows = sum(config.num_embeddings for config in model.sparse.embedding_bag_configs())
    # Every shard of a row has a scale and a bias; on one rank a row is one shard.
    assert sizes[2] == sizes[0] // 4 + 4 * rows
    assert sizes[3] == sizes[0] // 8 + 4 * rows


def test_the_grid_is_kept_exactly() -> None:
    """Or the comparison of one rank with many would compare rounded sums."""
    weight = torch.empty(3, 8)
    on_grid(weight, Random(0))
    for form in WeightFormat:
        assert torch.equal(decode(encode(weight, form), form), weight)
