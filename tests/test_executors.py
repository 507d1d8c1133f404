"""Each executor has what each other one has: the table of docs/scripting.md, each cell run on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec._torchscript import quiet
from shardrec.layout import ShardingPlan, Topology, cuts
from tests.collective_counts import CollectiveOperators
from tests.executors import executed
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks
from tests.scripting.lookups import reload

DIM = 8
ROWS = {"a": 13, "b": 29, "c": 17, "d": 23}
PAGE = Path(__file__).parent.parent / "docs" / "scripting.md"


class Three(nn.Module):
    """Two collections of bags and one of rows, used after all of them were called."""

    def __init__(self, weighted: bool) -> None:
        super().__init__()
        self.one = EmbeddingBagCollection(tables=[_bags("a"), _bags("b", weighted)], is_weighted=weighted)
        self.two = EmbeddingBagCollection(tables=[_bags("c")], is_weighted=weighted)
        self.rows = EmbeddingCollection(
            tables=[EmbeddingConfig(name="t_d", num_embeddings=ROWS["d"], embedding_dim=DIM, feature_names=["d"])]
        )

    def forward(self, bags: KeyedJaggedTensor, sequences: KeyedJaggedTensor) -> Tensor:
        one = self.one(bags)
        two = self.two(bags)
        rows = self.rows(sequences)
        pooled = one.values().square().sum(dim=1) + two.values().sum(dim=1)
        return pooled + torch.tanh(rows["d"].values()).sum() + rows["d"].lengths()


def _bags(feature: str, weighted: bool = True) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=f"t_{feature}",
        num_embeddings=ROWS[feature],
        embedding_dim=DIM,
        feature_names=[feature],
        pooling=PoolingType.SUM if weighted else PoolingType.MEAN,
    )


def _plan(ranks_per_host: int) -> ShardingPlan:
    world_size = dist.get_world_size()
    return ShardingPlan(
        topology=Topology(hosts=world_size // ranks_per_host, ranks_per_host=ranks_per_host),
        tables=(
            cuts.row_wise("one.t_a", ROWS["a"], DIM, ranks=range(world_size)),
            cuts.column_wise("one.t_b", ROWS["b"], DIM, ranks=(1, 0)),
            cuts.row_wise("two.t_c", ROWS["c"], DIM, ranks=range(world_size)),
            cuts.row_wise("rows.t_d", ROWS["d"], DIM, ranks=range(world_size)),
        ),
    )


def _batch(rng: Random, *, sizes: dict[str, int], weighted: bool, learned: bool = False) -> KeyedJaggedTensor:
    lengths = [rng.randrange(4) for size in sizes.values() for _ in range(size)]
    per_feature = iter(lengths)
    ids = [
        rng.randrange(ROWS[key]) for key, size in sizes.items() for _ in range(size) for _ in range(next(per_feature))
    ]
    weights = torch.tensor([rng.random() for _ in ids]) if weighted else None
    if learned and weights is not None:
        weights.requires_grad_()
    varying = len(set(sizes.values())) > 1
    samples = max(sizes.values())
    inverse = torch.tensor([[rng.randrange(size) for _ in range(samples)] for size in sizes.values()])
    return KeyedJaggedTensor(
        keys=list(sizes),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int32),
        weights=weights,
        stride_per_key_per_rank=[[size] for size in sizes.values()] if varying else None,
        inverse_indices=(list(sizes), inverse) if varying else None,
    )


EXECUTORS = ("live script", "traced")
PORTABLE = "portable (inference)"
FEATURES: dict[str, dict[str, Any]] = {
    "one exchange for several collections": {},
    "a batch size per feature": {"varying": True},
    "weights of ids": {"weighted": True},
    "learned weights": {"weighted": True, "learned": True},
    "BF16 on the wire": {"comms": "bf16"},
    "INT8 on the wire": {"comms": "int8"},
    "shared memory between ranks": {"transport": "auto"},
    "process group between ranks": {"transport": "group"},
    "sums inside hosts": {"hosts": 2},
    "bad ids looked up as zeros": {"on_bad_id": "zero"},
    "dynamic ids": {"dynamic": ["one.t_a", "one.t_b", "two.t_c", "rows.t_d"]},
}


def _make(options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = Three(options.get("weighted", False))
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    hosts = options.get("hosts", 1)
    comms = options.get("comms")
    return shardrec.shard(
        model,
        _plan(dist.get_world_size() // hosts),
        transport=options.get("transport"),
        comms=None if comms is None else shardrec.QuantizedComms(output=comms, gradient=comms),
        dynamic_ids=dict.fromkeys(options.get("dynamic", []), shardrec.DynamicIds(evict="lru")),
        on_bad_id={} if "on_bad_id" not in options else dict.fromkeys(ROWS, options["on_bad_id"]),
    )


def _batches(options: dict[str, Any], step: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    rng = Random(10 * step + dist.get_rank())
    sizes = {"a": 5, "b": 3, "c": 4} if options.get("varying") else dict.fromkeys("abc", 5)
    weighted, learned = options.get("weighted", False), options.get("learned", False)
    bags = _batch(rng, sizes=sizes, weighted=weighted, learned=learned)
    rows = _batch(rng, sizes={"d": 3, "a": 5} if options.get("varying") else {"d": 5}, weighted=False)
    if "on_bad_id" in options:
        rows.values()[:1] = 99
    if "dynamic" in options:
        for values in (bags.values(), rows.values()):
            values.mul_(2**40 + 7)
    return bags, rows


def _trained(run: Any, model: Any, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, int]]:
    """Outputs, weights' gradients and weights of three steps, and the all-to-alls of the last."""
    found: list[Tensor] = []
    for step in range(3):
        batches = _batches(options, step)
        with CollectiveOperators() as forward:
            out = run(*batches)
        with CollectiveOperators() as backward:
            out.sum().backward()
        found.append(out.detach())
        given = batches[0].weights_or_none()
        if options.get("learned"):
            assert given is not None and given.grad is not None
            found.append(given.grad)
    counts = {"forward": sum(forward.all_to_alls().values()), "backward": sum(backward.all_to_alls().values())}
    return [*found, *(one.detach().clone() for one in model.parameters())], counts


def cell(executor: str, features: Sequence[str]) -> str:
    """What stands in the table for each of some features that a model has together: "yes", or why not."""
    options = {name: value for feature in features for name, value in FEATURES[feature].items()}
    eager, model = _make(options), _make(options)
    expected, expected_counts = _trained(eager, eager, options)
    if executor == PORTABLE:
        return _inferred(eager.eval(), options)
    try:
        with quiet():
            found, counts = _trained(executed(model, executor), model, options)
    except (shardrec.ShardrecError, torch.jit.Error) as error:
        return str(error)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert counts == expected_counts
    return "yes"


def _inferred(model: Any, options: dict[str, Any]) -> str:
    """The cell of a portable program: whether it gives what the trained model gives; on rank 0 saved and loaded, which
    takes torch some seconds."""
    try:
        with quiet(), torch.no_grad():
            program = shardrec.script(model)
            loaded = program if dist.get_rank() else reload(program)
            for step in range(3):
                batches = _batches(options, step)
                torch.testing.assert_close(loaded(*batches), model(*batches), atol=1e-6, rtol=1e-5)
    except (shardrec.ShardrecError, torch.jit.Error) as error:
        return str(error)
    return "yes"


def column(executor: str, cells: Sequence[Sequence[str]]) -> list[str]:
    """The cells of an executor."""
    return [cell(executor, features) for features in cells]


SAME = {"shared memory between ranks"}
"""What all other cells do, too."""

ON_TWO = [(feature,) for feature, options in FEATURES.items() if "hosts" not in options and feature not in SAME]
ON_FOUR = [(feature,) for feature, options in FEATURES.items() if "hosts" in options]
TOGETHER = [
    ("one exchange for several collections",),
    ("a batch size per feature", "BF16 on the wire"),
    ("weights of ids", "bad ids looked up as zeros", "process group between ranks"),
    ("learned weights", "INT8 on the wire", "dynamic ids"),
]
"""All that are on two ranks, compiled half as often."""

REFUSED = {
    "a batch size per feature": "the features have a batch size each, which portable programs do not take",
    "BF16 on the wire": "A program that runs without shardrec exchanges fp32",
    "INT8 on the wire": "A program that runs without shardrec exchanges fp32",
    "dynamic ids": "shard the model with dedup=False",
}


OTHERWISE = {
    "one exchange for several collections": "one for each collection",
    "learned weights": "no gradient",
    "shared memory between ranks": "the process group",
    "sums inside hosts": "the same values, without the sums",
    "dynamic ids": "looked up, none learned; of rows with `dedup=False`",
}
"""What a portable program does in another way."""


def table() -> str:
    """The page's table, of what the tests below hold."""
    lines = [f"| | eager | live script | traced | {PORTABLE} |", "|---|---|---|---|---|"]
    for feature in FEATURES:
        portable = OTHERWISE.get(feature, f"refused: {REFUSED[feature]}" if feature in REFUSED else "yes")
        lines.append(f"| {feature} | yes | yes | yes | {portable} |")
    return "\n".join(lines)


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text(), "put what table() gives into docs/scripting.md"


def test_all_features_of_two_ranks_are_in_some_cell_together() -> None:
    assert {feature for cell in TOGETHER for feature in cell} == {feature for (feature,) in ON_TWO}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("executor", "cells"),
    [
        *(
            pytest.param(executor, [cell], id=f"{executor}-together-{number}")
            for executor in (*EXECUTORS, PORTABLE)
            for number, cell in enumerate(TOGETHER)
        ),
        *(
            pytest.param(executor, cells, marks=pytest.mark.slow, id=f"{executor}-{number}")
            for executor in (*EXECUTORS, PORTABLE)
            for number, cells in (("two", ON_TWO), ("four", ON_FOUR))
        ),
    ],
)
def test_every_cell(executor: str, cells: list[tuple[str, ...]]) -> None:
    """The same outputs, gradients, weights and collectives as in eager mode; of portable programs the outputs."""
    world_size = 4 if cells == ON_FOUR else 2
    for found in ranks(world_size, column, executor, cells, timeout=300):
        for features, said in zip(cells, found, strict=True):
            refused = [REFUSED[feature] for feature in features if feature in REFUSED and executor == PORTABLE]
            assert any(reason in said for reason in refused or ["yes"]), (features, said)
