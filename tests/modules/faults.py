"""Ways to spoil a batch, and what the error must say of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.layout import ShardingPlan, Topology, cuts
from tests.models import feature_rows

__all__ = [
    "CONFIGS",
    "ROWS",
    "STRUCTURE_FAULTS",
    "WEIGHT_FAULTS",
    "Fault",
    "guilty_ranks",
    "id_faults",
    "plan_of",
    "rebuilt",
]

CONFIGS = [
    EmbeddingBagConfig(name="movies", num_embeddings=12, embedding_dim=8, feature_names=["watched", "liked"]),
    EmbeddingBagConfig(name="tags", num_embeddings=6, embedding_dim=4, feature_names=["tag"]),
    EmbeddingBagConfig(name="days", num_embeddings=7, embedding_dim=4, feature_names=["day"]),
    EmbeddingBagConfig(name="users", num_embeddings=9, embedding_dim=8, feature_names=["user"]),
]
ROWS = feature_rows(CONFIGS)
TABLES = {feature: config.name for config in CONFIGS for feature in config.feature_names}


def plan_of(world_size: int, path: str) -> ShardingPlan:
    """Row-wise, table-wise, data-parallel and column-wise: a way of its own for every table."""
    ranks_ = list(range(world_size))
    return ShardingPlan(
        topology=Topology(ranks_per_host=world_size),
        tables=(
            cuts.row_wise(f"{path}movies", 12, 8, ranks=ranks_),
            cuts.table_wise(f"{path}tags", 6, 4, rank=world_size - 1),
            cuts.data_parallel(f"{path}days", 7, 4),
            cuts.column_wise(f"{path}users", 9, 8, ranks=ranks_[:2]),
        ),
    )


Change = Callable[[KeyedJaggedTensor], Any]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A way to spoil a batch.

    Args:
        name: for messages.
        change: makes the bad input of a good one.
        words: regular expression that the message must match.
    """

    name: str
    change: Change
    words: str


def rebuilt(features: KeyedJaggedTensor, **changes: Any) -> KeyedJaggedTensor:
    """A copy with other parts."""
    parts = {
        "keys": features.keys(),
        "values": features.values().clone(),
        "lengths": features.lengths().clone(),
        "weights": features.weights_or_none(),
    }
    return KeyedJaggedTensor(**{**parts, **changes})


def with_id(feature: str, one: int, position: int) -> Change:
    """Put an id into the first bag of a feature, as its first or last."""

    def change(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        keys = features.keys()
        size = features.stride()
        bags = {
            key: [list(part) for part in features[key].values().split(features[key].lengths().tolist())] for key in keys
        }
        bags[feature][0].insert(position if position >= 0 else len(bags[feature][0]), torch.tensor(one))
        flat = [int(value) for key in keys for bag in bags[key] for value in bag]
        lengths = [len(bag) for key in keys for bag in bags[key]]
        return KeyedJaggedTensor(keys=keys, values=torch.tensor(flat), lengths=torch.tensor(lengths), stride=size)

    return change


def id_faults() -> list[Fault]:
    """The first and the last id of each feature's first bag, below and above its table."""
    found = []
    for feature, rows in ROWS.items():
        for one in (-1, rows, 2**40):
            for position in (0, -1):
                found.append(
                    Fault(
                        name=f"{feature} {one} at {position}",
                        change=with_id(feature, one, position),
                        words=rf"feature '{feature}' of table '\w*\.?{TABLES[feature]}': id {one} in sample 0 is "
                        rf"outside \[0, {rows}\). Hash or clip the ids into the table, or raise num_embeddings",
                    )
                )
    return found


def first_length(features: KeyedJaggedTensor, change: int) -> KeyedJaggedTensor:
    lengths = features.lengths().clone()
    lengths[0] += change
    return rebuilt(features, lengths=lengths)


def renamed(features: KeyedJaggedTensor, old: str, new: str) -> KeyedJaggedTensor:
    keys = features.keys()
    return rebuilt(features, keys=[new if key == old else key for key in keys])


def without(features: KeyedJaggedTensor, key: str) -> KeyedJaggedTensor:
    keys = features.keys()
    return KeyedJaggedTensor.from_jt_dict({other: features[other] for other in keys if other != key})


STRUCTURE_FAULTS = [
    Fault(name="longer", change=lambda x: first_length(x, 3), words=r"lengths of features \[.*add up to \d+ and there"),
    Fault(name="shorter", change=lambda x: first_length(x, 0 - int(x.lengths()[0]) or 1), words=r"add up to \d+ and"),
    Fault(
        name="negative",
        change=lambda x: first_length(x, -9),
        words=r"feature '\w+' of table '\S*': the length of sample 0 is -\d; lengths must not be negative",
    ),
    Fault(
        name="sum wraps",
        change=lambda x: rebuilt(x, lengths=torch.tensor([2**62] * 4 + [x.values().numel()] + [0] * 5)),
        words=r"lengths of features|add up to|length of sample",
    ),
    Fault(
        name="offsets that descend",
        change=lambda x: rebuilt(x, lengths=None, offsets=torch.tensor([0, 3, 1, *[x.values().numel()] * 8])),
        words=r"the length of sample \d is -\d|lengths must not be negative|offsets",
    ),
    Fault(
        name="one length less",
        change=lambda x: rebuilt(x, lengths=x.lengths()[1:]),
        words=r"there are \d+ lengths for 5 features of batch size \d. Give exactly one length",
    ),
    Fault(
        name="missing key",
        change=lambda x: without(x, "tag"),
        words=r"the input lacks feature\(s\) 'tag' \(table '\S*tags'\). Its keys are \[.*\]: rename the key, or give",
    ),
    Fault(
        name="renamed key",
        change=lambda x: renamed(x, "day", "Day"),
        words=r"the input lacks feature\(s\) 'day' \(table '\S*days'\). Its keys are \[.*'Day'.*\]: rename the key",
    ),
    Fault(
        name="key twice",
        change=lambda x: renamed(x, "day", "tag"),
        words=r"feature\(s\) 'tag' come more than once among the keys",
    ),
    Fault(
        name="float ids",
        change=lambda x: rebuilt(x, values=x.values().double()),
        words=r"the ids are float64 \(features from 'watched' of table '\S*movies' on.*\). Ids must be int32 or int64: "
        r"convert them with \.long\(\)",
    ),
    Fault(
        name="meta",
        change=lambda x: rebuilt(x, values=x.values().to("meta"), lengths=x.lengths().to("meta")),
        words=r"the ids are on meta and the tables of this module .* on cpu. Move the batch with \.to\('cpu'\)",
    ),
    Fault(
        name="lengths on meta",
        change=lambda x: rebuilt(x, lengths=x.lengths().to("meta")),
        words=r"the lengths are on meta and the tables of this module",
    ),
    Fault(
        name="batch size per feature",
        change=lambda x: KeyedJaggedTensor(
            keys=x.keys(),
            values=torch.zeros(5, dtype=torch.int64),
            lengths=torch.tensor([1, 1, 1, 1, 1, 0]),
            stride_per_key_per_rank=[[2], [1], [1], [1], [1]],
        ),
        words=r"the features have a batch size each \(\[2, 1, 1, 1, 1\]\).*pad the short features with empty bags",
    ),
    Fault(
        name="inverse indices on meta",
        change=lambda x: rebuilt(
            x, inverse_indices=(x.keys(), torch.zeros((5, x.stride()), dtype=torch.int64, device="meta"))
        ),
        words=r"the inverse indices are on meta and the tables of this module",
    ),
    Fault(
        name="float inverse indices",
        change=lambda x: rebuilt(x, inverse_indices=(x.keys(), torch.zeros((5, x.stride())))),
        words=r"the inverse indices are float32 of shape \(5, \d\) for .*. Give int64 of shape \(features, samples\)",
    ),
    Fault(
        name="no lengths",
        change=lambda x: KeyedJaggedTensor(keys=x.keys(), values=x.values()),
        words=r"neither lengths nor offsets\. .* is weights: pass lengths=",
    ),
    Fault(name="None", change=lambda x: None, words=r"the input is a NoneType. .* takes a torchrec KeyedJaggedTensor"),
    Fault(name="tensor", change=lambda x: x.values(), words=r"the input is a Tensor. .* takes a torchrec KeyedJagged"),
    Fault(
        name="dict", change=lambda x: x.to_dict(), words=r"the input is a dict. .* takes a torchrec KeyedJaggedTensor"
    ),
]


WEIGHT_FAULTS = [
    Fault(
        name="no weights",
        change=lambda x: rebuilt(x, weights=None),
        words=r"the input lacks weights and .* feature 'watched' \(table 'movies'\) has is_weighted=True. Give the",
    ),
    Fault(
        name="one weight more",
        change=lambda x: rebuilt(x, weights=torch.ones(x.values().numel() + 1)),
        words=r"the weights have shape \(\d+,\) and the ids \(\d+,\). Give one weight for each id",
    ),
    Fault(
        name="whole weights",
        change=lambda x: rebuilt(x, weights=torch.full((x.values().numel(),), 3)),
        words=r"the weights are int64, the first is 3. They must be floating point",
    ),
]


def guilty_ranks(world_size: int, number: int) -> list[int]:
    """Each rank in turn, then all of them."""
    turn = number % (world_size + 1)
    return [turn] if turn < world_size else list(range(world_size))
