"""Is a batch one that the lookups can take? A fast answer on the device, and a slow one in words.

Shapes: F features of the KeyedJaggedTensor, B samples, N ids.

[Note: validation without a host sync]
Nothing here reads a tensor's value on the host before the header exchange does. :func:`ids_are_valid` gives a 0-d
tensor; the caller multiplies the lengths by it, so that the kernels downstream see an empty batch instead of reading
past the end of a bad one, and sends it in the header. Only when the header says that some rank's batch is bad does that
rank look for the words (:func:`describe_fault`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = ["NO_LIMIT", "Batch", "Expectation", "describe_fault", "ids_are_valid", "read_batch"]

_ID_DTYPES = (torch.int32, torch.int64)
_MAX_SHOWN_KEYS = 12

NO_LIMIT = 2**63 - 1
"""In place of a number of rows: the ids of this key are not looked up."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a sharded module expects of its input.

    Args:
        tables: per lookup, its feature, its table and the table's number of rows.
        weighted: whether each id comes with a float weight.
        device: where the tensors must be.
    """

    tables: tuple[tuple[str, str, int], ...]
    weighted: bool
    device: torch.device

    def rows(self, feature: str) -> int:
        """Ids of ``feature`` must be below this; ``NO_LIMIT`` if no table uses the feature."""
        return min((rows for key, _, rows in self.tables if key == feature), default=NO_LIMIT)

    def of_table(self, feature: str) -> str:
        """The smallest table that ``feature`` is looked up in, for messages: ``" of table 't'"``, or nothing."""
        tables = [(rows, table) for key, table, rows in self.tables if key == feature]
        return f" of table {min(tables)[1]!r}" if tables else ""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of a KeyedJaggedTensor: ``lengths`` (F, B) and ``values`` (N,) integer, ``weights`` (N,) float."""

    keys: tuple[str, ...]
    lengths: Tensor
    values: Tensor
    weights: Tensor | None

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.lengths.size(1)


def read_batch(features: object, expect: Expectation) -> Batch | str:
    """The batch's tensors, or what is wrong with its structure (all that shows without reading a tensor)."""
    if not isinstance(features, KeyedJaggedTensor):
        return f"the input is a {type(features).__name__}; a sharded collection takes a torchrec KeyedJaggedTensor"
    try:
        return _read(features, expect)
    except Exception as error:
        # torchrec looks at lengths and values only when asked for them. An error that left this rank without an answer
        # would leave the others waiting for its header.
        return (
            f"the KeyedJaggedTensor cannot be read ({type(error).__name__}: {error}); check how its values and lengths "
            "(or offsets) were built"
        )


def _read(features: KeyedJaggedTensor, expect: Expectation) -> Batch | str:
    keys = tuple(features.keys())
    fault = _key_fault(keys, expect) or _id_fault(features, expect) or _weight_fault(features, expect)
    if fault is not None:
        return fault
    if features.variable_stride_per_key():
        return (
            f"the features have a batch size each ({features.stride_per_key()}); this module takes one batch size for "
            "all its features: pad the short ones with empty bags"
        )
    lengths = features.lengths()
    fault = _device_fault("lengths", lengths, expect)
    if fault is not None:
        return fault
    if lengths.dim() != 1 or lengths.numel() % len(keys) or lengths.numel() != len(keys) * features.stride():
        return (
            f"there are {lengths.numel()} lengths for {len(keys)} features of batch size {features.stride()}; give "
            "exactly one length for each feature and sample"
        )
    batch_size = lengths.numel() // len(keys)
    return Batch(
        keys=keys,
        lengths=lengths.detach().view(len(keys), batch_size),
        values=features.values(),
        weights=features.weights() if expect.weighted else None,
    )


def _key_fault(keys: Sequence[str], expect: Expectation) -> str | None:
    present = set(keys)
    if len(present) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        return f"feature(s) {', '.join(map(repr, twice))} come more than once among the keys {_shown(keys)}"
    missing = [(key, table) for key, table, _ in expect.tables if key not in present]
    if not missing:
        return None
    named = ", ".join(f"{key!r} (table {table!r})" for key, table in missing[:_MAX_SHOWN_KEYS])
    return (
        f"the input lacks feature(s) {named}; its keys are {_shown(keys)}: rename the key, or give the feature with "
        "empty bags"
    )


def _shown(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_SHOWN_KEYS} more" if len(keys) > _MAX_SHOWN_KEYS else ""
    return f"[{', '.join(map(repr, keys[:_MAX_SHOWN_KEYS]))}{more}]"


def _id_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    values = features.values()
    feature, table, _ = expect.tables[0]
    if values.dtype not in _ID_DTYPES:
        return (
            f"the ids are {_name(values.dtype)} (features from {feature!r} of table {table!r} on{_first(values)}); ids "
            "must be int32 or int64: convert them with .long()"
        )
    if values.dim() != 1:
        return f"the ids have shape {tuple(values.shape)}; they must be one-dimensional"
    return _device_fault("ids", values, expect)


def _device_fault(what: str, tensor: Tensor, expect: Expectation) -> str | None:
    if tensor.device.type == expect.device.type:
        return None
    feature, table, _ = expect.tables[0]
    return (
        f"the {what} are on {tensor.device} and the tables of this module ({table!r} of feature {feature!r} and on) on "
        f"{expect.device}; move the batch with .to({str(expect.device)!r})"
    )


def _first(values: Tensor) -> str:
    """The first value in words, where there is one to read."""
    if values.numel() == 0 or values.is_meta:
        return ""
    return f", the first is {values.detach().flatten()[0].item():g}"


def _weight_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    weights = features.weights_or_none()
    feature, table, _ = expect.tables[0]
    if weights is None:
        if not expect.weighted:
            return None
        return (
            f"the input has no weights and the collection of feature {feature!r} (table {table!r}) has "
            "is_weighted=True; give the KeyedJaggedTensor weights, one per id"
        )
    value = _first(weights)
    if not expect.weighted:
        return (
            f"the input has {weights.numel()} weights{value} and the collection of feature {feature!r} (table "
            f"{table!r}) has is_weighted=False; drop the weights, or build the collection with is_weighted=True"
        )
    if not weights.dtype.is_floating_point:
        return f"the weights are {_name(weights.dtype)}{value}; they must be floating point: convert with .float()"
    if weights.shape != features.values().shape:
        return (
            f"the weights have shape {tuple(weights.shape)} and the ids {tuple(features.values().shape)}; give one "
            "weight for each id"
        )
    if weights.requires_grad:
        return "the weights require a gradient, which the exchange does not carry back; pass weights.detach()"
    return _device_fault("weights", weights, expect)


def ids_are_valid(batch: Batch, limits: Tensor, *, unused_keys: bool) -> Tensor:
    """Whether lengths add up and each id is in its table.

    Args:
        batch: the tensors of the input.
        limits: (F,) int64, one more than the largest id allowed, per key of the batch; ``NO_LIMIT`` for a key that no
            table uses, whose ids may be anything.
        unused_keys: whether there is such a key.

    Returns:
        0-d bool tensor on the batch's device.
    """
    count = batch.values.numel()
    lengths_F = batch.lengths.sum(dim=1, dtype=torch.int64)
    sound = (lengths_F.sum() == count) & (batch.lengths >= 0).all()
    if count == 0:
        return sound
    if batch.values.device.type == "cpu":
        if not bool(sound):
            return sound
        limit_N = limits.repeat_interleave(lengths_F, output_size=count)
    else:
        ends_F = lengths_F.cumsum(0)
        feature_N = torch.searchsorted(ends_F, torch.arange(count, device=ends_F.device), right=True)
        limit_N = limits[feature_N.clamp_(max=limits.numel() - 1)]
    inside = (batch.values >= 0) & (batch.values < limit_N)
    if unused_keys:
        inside |= limit_N == NO_LIMIT
    return sound & inside.all()


def describe_fault(batch: Batch, expect: Expectation) -> str:
    """Words for a batch that :func:`ids_are_valid` refused. Reads tensors on the host: for the failing step only."""
    lengths = batch.lengths.cpu()
    negative = (lengths < 0).nonzero()
    if len(negative):
        row, sample = negative[0].tolist()
        return (
            f"feature {batch.keys[row]!r}{expect.of_table(batch.keys[row])}: the length of sample {sample} is "
            f"{int(lengths[row, sample])}; lengths must not be negative: check how lengths (or offsets) were built"
        )
    total, count = int(lengths.sum()), batch.values.numel()
    if total != count:
        return (
            f"the lengths of features {_shown(batch.keys)} add up to {total} and there are {count} ids; they must be "
            "equal: check how lengths (or offsets) and values were built"
        )
    start = 0
    for row, key in enumerate(batch.keys):
        length = int(lengths[row].sum())
        values = batch.values[start : start + length].cpu()
        limit = expect.rows(key)
        bad = ((values < 0) | (values >= limit)).nonzero()
        if limit != NO_LIMIT and len(bad):
            position = int(bad[0])
            sample = int((lengths[row].cumsum(0) <= position).sum())
            more = f" (and {len(bad) - 1} more of this feature)" if len(bad) > 1 else ""
            return (
                f"feature {key!r}{expect.of_table(key)}: id {int(values[position])} in sample {sample}{more} "
                f"is outside [0, {limit}); hash or clip the ids into the table, or raise num_embeddings"
            )
        start += length
    raise AssertionError("describe_fault was called for a batch without a fault")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
