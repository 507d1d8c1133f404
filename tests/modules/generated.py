"""Generated batches, good and bad, for every executor; what a good one makes is said by loops over NumPy arrays.

The loops know nothing of shardrec, torchrec or autograd: the loss is the sum of the outputs times numbers that are
drawn with the batch, so that the gradient of an output is those numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import InputError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.modules.collection import ShardedCollection

__all__ = ["BAD", "Given", "Kind", "campaign"]

LR = 0.05
ROWS = {"ta": 11, "tb": 7, "tc": 5, "td": 11, "te": 9}
POOLED = [("ta", "a", 8, False), ("tb", "b", 4, True), ("tb", "c", 4, True), ("tc", "b", 4, False)]
ROW_BY_ROW = [("td", "a", 8), ("te", "b", 8), ("te", "c", 8)]
POLICIES = {"a": "error", "b": "zero", "c": "wrap"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A model.

    Args:
        weighted: each id has a weight; without the row-by-row collection.
        sizes: the features have a batch size each.
        policies: of bad ids; else they are errors.
    """

    weighted: bool = False
    sizes: bool = False
    policies: bool = False

    @property
    def rows_too(self) -> bool:
        return not self.weighted

    def policy(self, feature: str) -> str:
        return POLICIES[feature] if self.policies else "error"

    def limit(self, feature: str, lookups: Sequence[tuple[Any, ...]]) -> int:
        """Of the smallest table that a collection looks the feature up in."""
        return min(ROWS[table] for table, key, *_ in lookups if key == feature)


@dataclass(frozen=True, kw_only=True)
class Given:
    """One rank's batch: per key its bags, each a list of ids.

    Args:
        keys: in order.
        bags: per key and bag.
        weights: likewise, or None.
        inverse: per feature, the bag of each sample; None where bags are samples.
        ids: dtype of the ids.
        lengths: dtype of the lengths.
        offsets: give offsets in place of lengths.
    """

    keys: list[str]
    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]] | None
    inverse: dict[str, list[int]] | None
    ids: torch.dtype
    lengths: torch.dtype
    offsets: bool

    def parts(self) -> dict[str, Any]:
        """What a KeyedJaggedTensor is made of."""
        lengths = [len(bag) for key in self.keys for bag in self.bags[key]]
        values = [one for key in self.keys for bag in self.bags[key] for one in bag]
        parts: dict[str, Any] = {
            "keys": list(self.keys),
            "values": torch.tensor(values, dtype=self.ids),
            "lengths": torch.tensor(lengths, dtype=self.lengths),
        }
        if self.offsets:
            parts["offsets"] = nn.functional.pad(parts.pop("lengths").cumsum(0), [1, 0]).to(self.lengths)
        if self.weights is not None:
            parts["weights"] = torch.tensor([w for key in self.keys for bag in self.weights[key] for w in bag])
        sizes = [len(self.bags[key]) for key in self.keys]
        if self.inverse is None:
            parts["stride"] = sizes[0]
        else:
            parts["stride_per_key_per_rank"] = [[size] for size in sizes]
            parts["inverse_indices"] = (list(self.inverse), torch.tensor(list(self.inverse.values())))
        return parts


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        pooled: dict[str, EmbeddingBagConfig] = {}
        for table, feature, dim, mean in POOLED:
            pooled.setdefault(
                table,
                EmbeddingBagConfig(
                    name=table,
                    num_embeddings=ROWS[table],
                    embedding_dim=dim,
                    feature_names=[],
                    pooling=PoolingType.MEAN if mean else PoolingType.SUM,
                ),
            ).feature_names.append(feature)
        rows: dict[str, EmbeddingConfig] = {}
        for table, feature, dim in ROW_BY_ROW:
            rows.setdefault(
                table,
                EmbeddingConfig(name=table, num_embeddings=ROWS[table], embedding_dim=dim, feature_names=[]),
            ).feature_names.append(feature)
        self.bags = EmbeddingBagCollection(tables=list(pooled.values()), is_weighted=kind.weighted)
        self.rows = EmbeddingCollection(tables=list(rows.values()))
        self.scale = nn.Parameter(torch.ones(1))


class Both(Model):
    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        rows = self.rows(features)
        pooled = self.bags(features).values()
        return [pooled * self.scale, rows["a"].values(), rows["b"].values(), rows["c"].values()]


class Pooled(Model):
    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        del self.rows

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return [self.bags(features).values() * self.scale]


def make(kind: Kind, executor: str) -> tuple[ShardedModel, dict[str, np.ndarray]]:
    """A sharded model, the same for the same arguments, and its tables in float64."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = Both(kind) if kind.rows_too else Pooled(kind)
    collections = [model.bags, model.rows] if kind.rows_too else [model.bags]
    tables: dict[str, np.ndarray] = {}
    layouts = []
    for path, collection in zip(("bags", "rows"), collections, strict=False):
        _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": LR})
        for name, weight in collection.named_parameters():
            table = name.split(".")[1]
            rows, dim = weight.shape
            tables[table] = weight.detach().numpy().astype(np.float64)
            full = f"{path}.{table}"
            if table in ("ta", "td"):
                layouts.append(cuts.row_wise(full, rows, dim, ranks=range(world_size)))
            elif table == "tb" and dim >= 4 * world_size:
                layouts.append(cuts.column_wise(full, rows, dim, ranks=range(world_size)))
            elif table == "tc" and executor != "scripted":
                layouts.append(cuts.data_parallel(full, rows, dim))
            else:
                layouts.append(cuts.table_wise(full, rows, dim, rank=world_size - 1))
    plan = ShardingPlan(topology=Topology(ranks_per_host=world_size), tables=tuple(layouts))
    policies = {key: policy for key, policy in POLICIES.items() if kind.policies}
    return shard(model, plan, on_bad_id=policies), tables  # type: ignore[arg-type]


def good(rng: Random, kind: Kind, shared: Random) -> Given:
    """One rank's batch; what ranks have to have in common is drawn from ``shared``."""
    ids = shared.choice([torch.int32, torch.int64])
    unused = rng.choice([[], [], ["x"], ["y", "x"]])
    keys = [*POLICIES, *unused]
    if rng.random() < 0.3:
        rng.shuffle(keys)
    size = rng.choice([0, 1, 2, 3, 6])
    samples = rng.randint(1, 5)
    bags: dict[str, list[list[int]]] = {}
    for key in keys:
        count = rng.randint(1, 4) if kind.sizes else size
        bags[key] = [one_bag(rng, kind, key, ids) for _ in range(count)]
    weights = None
    if kind.weighted:
        weights = {key: [[rng.uniform(-2, 2) for _ in bag] for bag in bags[key]] for key in keys}
    inverse = None
    if kind.sizes:
        inverse = {key: [rng.randrange(len(bags[key])) for _ in range(samples)] for key in POLICIES}
    lengths = rng.choice([torch.int32, torch.int64])
    return Given(
        keys=keys,
        bags=bags,
        weights=weights,
        inverse=inverse,
        ids=ids,
        lengths=lengths,
        offsets=rng.random() < 0.2 and not kind.sizes,
    )


def one_bag(rng: Random, kind: Kind, key: str, ids: torch.dtype) -> list[int]:
    count = rng.choice([0, 0, 1, 2, 3, 3]) if rng.random() < 0.998 else rng.randint(200, 1500)
    least, most = torch.iinfo(ids).min, torch.iinfo(ids).max
    anything = [least, -1, most, 10**6, rng.randint(least, most)]
    if key not in POLICIES:
        return [rng.choice(anything) for _ in range(count)]
    limit = kind.limit(key, POOLED)
    found = [rng.choice([0, limit - 1, rng.randrange(limit)]) for _ in range(count)]
    if kind.policy(key) != "error" and rng.random() < 0.3:
        found = [rng.choice([one, one, *anything, limit]) for one in found]
    return found


# name -> the parts of a batch changed; the first argument draws, the second has its ids' number.
Change = Callable[[Random, dict[str, Any]], None]


def _set_id(rng: Random, parts: dict[str, Any], one: int) -> None:
    parts["keys"] = ["a", *[key for key in parts["keys"] if key != "a"]]
    sizes = len(parts["keys"])
    parts["values"] = torch.tensor([one, 0, 0], dtype=torch.int64 if abs(one) > 2**31 else parts["values"].dtype)
    lengths = [3, *[0] * (sizes - 1)]
    _lengths(parts, lengths)
    parts["stride"] = 1


def _lengths(parts: dict[str, Any], lengths: Sequence[int]) -> None:
    for name in ("offsets", "stride_per_key_per_rank", "inverse_indices"):
        parts.pop(name, None)
    parts["lengths"] = torch.tensor(lengths, dtype=torch.int64)
    if "weights" in parts:
        parts["weights"] = torch.ones(parts["values"].numel())


def _whole(parts: dict[str, Any], lengths: Sequence[int], ids: int, dtype: torch.dtype = torch.int64) -> None:
    """Lengths of two samples per key, and so many ids."""
    parts["values"] = torch.zeros(ids, dtype=parts["values"].dtype)
    keys = len(parts["keys"])
    _lengths(parts, [*lengths, *[0] * (2 * keys - len(lengths))][: 2 * keys])
    parts["lengths"] = parts["lengths"].to(dtype)
    parts["stride"] = 2


def _other(parts: dict[str, Any], ids: int = 4) -> None:
    _whole(parts, [1] * ids, ids)


def _with(change: Callable[[dict[str, Any]], None]) -> Change:
    def changed(rng: Random, parts: dict[str, Any]) -> None:
        _other(parts)
        change(parts)

    return changed


def _update(**new: Any) -> Change:
    return _with(lambda parts: parts.update(**{name: make(parts) for name, make in new.items()}))


BAD: dict[str, Change] = {
    "negative id": lambda rng, parts: _set_id(rng, parts, -rng.choice([1, 7, 2**31])),
    "too large": lambda rng, parts: _set_id(rng, parts, rng.choice([11, 12, 10**6, 2**31 - 1])),
    "far too large": lambda rng, parts: _set_id(rng, parts, rng.choice([2**31 + 1, 2**32, 2**63 - 1, -(2**63)])),
    "negative length": lambda rng, parts: _whole(parts, rng.choice([[-1, 5], [4, -4, 4], [-(2**63), 4]]), 4),
    "sum wraps": lambda rng, parts: _whole(parts, [*[2**62] * 4, 3], 3),
    "sum wraps at once": lambda rng, parts: _whole(parts, [2**63 - 1, 2**63 - 1, 2, 3], 3),
    "sum wraps with a negative": lambda rng, parts: _whole(parts, [-(2**63), -(2**63), 3], 3),
    "sum wraps as int32": lambda rng, parts: _whole(parts, [2**31 - 1, 2**31 - 1, 2, 3], 3, torch.int32),
    "wraps if narrowed": lambda rng, parts: _whole(parts, [2**32 + 1, 2**32 + 2], 3),
    "longer": lambda rng, parts: _whole(parts, [2, 3], 4),
    "shorter": lambda rng, parts: _whole(parts, [2, 1], 4),
    "float ids": _update(values=lambda parts: parts["values"].double()),
    "byte ids": _update(values=lambda parts: parts["values"].to(torch.uint8)),
    "ids in two dimensions": _update(values=lambda parts: parts["values"].view(2, 2)),
    "short lengths": _update(lengths=lambda parts: parts["lengths"].to(torch.int16)),
    "a length missing": _update(lengths=lambda parts: parts["lengths"][:-1]),
    "missing key": _update(keys=lambda parts: [key if key != "b" else "other" for key in parts["keys"]]),
    "all keys missing": _update(keys=lambda parts: [f"{key}!" for key in parts["keys"]]),
    "offsets that begin later": _update(
        lengths=lambda parts: None, offsets=lambda parts: nn.functional.pad(parts["lengths"].cumsum(0), [1, 0]) + 1
    ),
    "offsets that descend": _update(
        offsets=lambda parts: torch.tensor([0, 3, 1, *[4] * (2 * len(parts["keys"]) - 2)]), lengths=lambda parts: None
    ),
    "offsets of other lengths": _update(
        offsets=lambda parts: torch.tensor([0, *[4] * (2 * len(parts["keys"]))]),
    ),
}
"""Each makes a bad batch of a good one's parts."""


class Reference:
    """The tables, in float64.

    Args:
        kind: of the model.
        tables: (rows, columns) by name.
    """

    def __init__(self, kind: Kind, tables: dict[str, np.ndarray]) -> None:
        self.kind = kind
        self.tables = tables
        self.bad = dict.fromkeys((feature for feature, policy in POLICIES.items() if policy != "error"), 0)

    def ids(self, batch: Given, feature: str, lookups: Sequence[tuple[Any, ...]]) -> list[list[int | None]]:
        """Rows that are looked up, bag by bag; None for a row of zeros."""
        limit, policy = self.kind.limit(feature, lookups), self.kind.policy(feature)
        found: list[list[int | None]] = []
        for bag in batch.bags[feature]:
            found.append(
                [one if 0 <= one < limit else (one % limit if policy == "wrap" else None) for one in bag],
            )
        return found

    def full_ids(self, batch: Given, feature: str) -> list[int | None]:
        """Of the collection of rows, sample after sample of the full batch."""
        bags = self.ids(batch, feature, ROW_BY_ROW)
        chosen = bags if batch.inverse is None else [bags[bag] for bag in batch.inverse[feature]]
        return [one for bag in chosen for one in bag]

    def count(self, batch: Given) -> None:
        """Bad ids of each collection."""
        for lookups in (POOLED, ROW_BY_ROW) if self.kind.rows_too else (POOLED,):
            for feature in self.bad:
                limit = self.kind.limit(feature, lookups)
                self.bad[feature] += sum(not 0 <= one < limit for bag in batch.bags[feature] for one in bag)

    def outputs(self, batch: Given, *, absolute: bool = False) -> list[np.ndarray]:
        """Pooled columns, then the rows of each feature; or sums of absolute values, which rounding goes by."""
        pooled = [self.pooled(batch, *one, absolute=absolute) for one in POOLED]
        found = [np.concatenate(pooled, axis=1)]
        if self.kind.rows_too:
            for table, feature, dim in ROW_BY_ROW:
                weight = self.tables[table]
                rows = [np.zeros(dim) if one is None else weight[one] for one in self.full_ids(batch, feature)]
                found.append(np.array(rows).reshape(len(rows), dim))
        return found

    def pooled(self, batch: Given, table: str, feature: str, dim: int, mean: bool, *, absolute: bool) -> np.ndarray:
        bags = []
        for number, bag in enumerate(self.ids(batch, feature, POOLED)):
            total = np.zeros(dim)
            for place, one in enumerate(bag):
                if one is not None:
                    weight = 1.0 if batch.weights is None else batch.weights[feature][number][place]
                    row = weight * self.tables[table][one]
                    total = total + (np.abs(row) if absolute else row)
            count = sum(one is not None for one in bag)
            bags.append(total / max(count, 1) if mean else total)
        whole = np.array(bags).reshape(len(bags), dim)
        return whole if batch.inverse is None else whole[batch.inverse[feature]]

    def train(self, batches: Sequence[Given], gradients: Sequence[Sequence[np.ndarray]]) -> None:
        """One step of SGD with the mean over ranks of the gradients."""
        changes = {name: np.zeros_like(table) for name, table in self.tables.items()}
        for batch, of_outputs in zip(batches, gradients, strict=True):
            start = 0
            for table, feature, dim, mean in POOLED:
                self._pooled_change(
                    changes[table], batch, feature, of_outputs[0][:, start : start + dim].astype(np.float64), mean
                )
                start += dim
            if self.kind.rows_too:
                for (table, feature, _), gradient in zip(ROW_BY_ROW, of_outputs[1:], strict=True):
                    for one, row in zip(self.full_ids(batch, feature), gradient, strict=True):
                        if one is not None:
                            changes[table][one] += row
        for name, change in changes.items():
            self.tables[name] = self.tables[name] - LR * change / len(batches)

    def _pooled_change(self, change: np.ndarray, batch: Given, feature: str, gradient: np.ndarray, mean: bool) -> None:
        bags = self.ids(batch, feature, POOLED)
        samples = range(len(bags)) if batch.inverse is None else batch.inverse[feature]
        for sample, number in enumerate(samples):
            count = sum(one is not None for one in bags[number])
            for place, one in enumerate(bags[number]):
                if one is not None:
                    weight = 1.0 if batch.weights is None else batch.weights[feature][number][place]
                    np.add.at(change, one, gradient[sample] * weight / (count if mean else 1))


@dataclass(kw_only=True)
class Counts:
    """What a campaign saw."""

    good: int = 0
    bad: int = 0
    trained: int = 0


def campaign(executor: str, kind: Kind, seed: int, batches: int) -> Counts:
    """Give batches to one model, and compare each with the loops; on this rank.

    Args:
        executor: "eager", "scripted" or "traced".
        kind: of the model.
        seed: of the batches.
        batches: how many.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    model, tables = make(kind, executor)
    reference = Reference(kind, tables)
    run: Any = model
    if executor == "scripted":
        run = shardrec.script(model)
    elif executor == "traced":
        shardrec.annotate_for_dynamo(model, mode="traced")
        run = torch.compile(model, backend="aot_eager", dynamic=True)
    counts = Counts()
    for number in range(batches):
        shared = Random(f"{seed}/{number}")
        every = [
            good(Random(f"{seed}/{number}/{other}"), kind, Random(f"{seed}/{number}/all"))
            for other in range(world_size)
        ]
        where = f"{executor}, {kind}, seed {seed}, batch {number}"
        if shared.random() < 0.3:
            _one_bad(run, model, shared, every, rank, where, executor)
            counts.bad += 1
            continue
        train = shared.random() < 0.7
        counts.good += 1
        counts.trained += train
        _one_good(
            run, model, reference, every, rank, where, train, Random(f"{seed}/{number}/gradients").randrange(2**31)
        )
    assert model.bad_ids() == (reference.bad if kind.policies else {}), f"{executor}, {kind}, seed {seed}: counts"
    return counts


def _one_good(
    run: Any,
    model: ShardedModel,
    reference: Reference,
    every: list[Given],
    rank: int,
    where: str,
    train: bool,
    seed: int,
) -> None:
    expected = [reference.outputs(batch) for batch in every]
    numbers = np.random.default_rng(seed)
    gradients = [[numbers.uniform(-1, 1, one.shape).astype(np.float32) for one in outputs] for outputs in expected]
    reference.count(every[rank])
    with torch.set_grad_enabled(train):
        outputs = run(KeyedJaggedTensor(**every[rank].parts()))
    sizes = reference.outputs(every[rank], absolute=True)
    for one, wanted, size in zip(outputs, expected[rank], sizes, strict=True):
        assert one.shape == wanted.shape, where
        # The model's weights are rounded to float32 in each step, the reference's are not.
        assert (np.abs(one.detach().numpy() - wanted) <= 1e-3 + 1e-4 * np.abs(size)).all(), where
    if train:
        loss = sum((one * torch.from_numpy(g)).sum() for one, g in zip(outputs, gradients[rank], strict=True))
        loss.backward()  # type: ignore[union-attr]
        reference.train(every, gradients)
    for collection in model.modules():
        if isinstance(collection, ShardedCollection):
            for name, table in collection.tables().items():
                for place, parameter in table.locals.items():
                    wanted = reference.tables[name]
                    if place is not None:
                        wanted = wanted[place.row_start : place.row_end, place.col_start : place.col_end]
                    np.testing.assert_allclose(
                        parameter.detach().numpy(), wanted, atol=2e-3, rtol=1e-3, err_msg=f"{where}: table {name}"
                    )


def _one_bad(
    run: Any, model: ShardedModel, shared: Random, every: list[Given], rank: int, where: str, executor: str
) -> None:
    name = shared.choice(list(BAD))
    guilty = shared.choice([[one] for one in range(len(every))] + [list(range(len(every)))])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    parts = every[rank].parts()
    if rank in guilty:
        if every[rank].inverse is not None:
            parts = replace(every[rank], inverse=None).parts() if _even(every[rank]) else parts
        BAD[name](shared, parts)
        parts = {key: value for key, value in parts.items() if value is not None}
    features = KeyedJaggedTensor(**parts)
    try:
        outputs = run(features)
    except Exception as error:
        assert isinstance(error, InputError) or (executor == "scripted" and "InputError" in str(error)), (
            f"{where}: {name}: {error!r}"
        )
    else:
        raise AssertionError(f"{where}: {name} on {guilty} was taken: {[one.shape for one in outputs]}")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)), f"{where}: {name}"


def _even(batch: Given) -> bool:
    return len({len(batch.bags[key]) for key in batch.keys}) == 1
