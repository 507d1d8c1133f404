"""A batch as the exchange takes it: the tensors of a KeyedJaggedTensor, and the faults of its structure.

Shapes: F features of the KeyedJaggedTensor, U features that the tables use, B samples, N ids.

[Note: a batch size per feature]
If each feature has its own batch size (samples that share a feature's bag send it once), the lengths per feature
are padded with empty bags to the largest size, so that this rank works on an ordinary batch. The padding is removed
before the batch is sent. ``inverse`` gives the bag per sample of the full batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import pad_sequence
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.exchange.to_device import staged

OnBadId = Literal["error", "zero", "wrap"]
"""What is done with an id outside ``[0, num_embeddings)``."""

_ID_DTYPES = (torch.int32, torch.int64)
_MAX_SHOWN_KEYS = 12
_MAX_IDS = 2**31 - 1  # lengths travel as 32 bits

KEY_ORDERS = 16
"""Size of the LRU cache of constants per key order."""

NO_LIMIT = 2**63 - 1
"""In place of a number of rows: the ids of this key may be any. They are dynamic, or not looked up."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a sharded module expects of its input.

    Args:
        tables: per lookup, its feature, its table and the table's number of rows (``NO_LIMIT`` of dynamic ids).
        weighted: whether each id has a float weight.
        device: where the tensors must be.
        pooled: whether bags are summed, for which features of different batch sizes need inverse indices.
        on_bad_id: the policy for ids outside their table, per feature for which they are not an error.
    """

    tables: tuple[tuple[str, str, int], ...]
    weighted: bool
    device: torch.device
    pooled: bool = True
    on_bad_id: Mapping[str, OnBadId] = field(default_factory=dict)

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The distinct features that the tables use."""
        return tuple(dict.fromkeys(key for key, _, _ in self.tables))

    def rows(self, feature: str) -> int:
        """Ids of ``feature`` must be below this. ``NO_LIMIT`` if they are dynamic, or no table uses the feature."""
        return self._rows.get(feature, NO_LIMIT)

    @cached_property
    def _rows(self) -> dict[str, int]:
        fewest_rows: dict[str, int] = {}
        for key, _, rows in self.tables:
            fewest_rows[key] = min(rows, fewest_rows.get(key, rows))
        return fewest_rows

    @cached_property
    def accepts(self) -> Callable[[tuple[str, ...]], bool]:
        """Whether keys are distinct, and include the features."""
        return lru_cache(maxsize=KEY_ORDERS)(partial(_are_accepted, self.features))

    def of_table(self, feature: str) -> str:
        """The smallest table that ``feature`` is looked up in, for messages: ``" of table 't'"``, or nothing."""
        tables = [(rows, table) for key, table, rows in self.tables if key == feature]
        return f" of table {min(tables)[1]!r}" if tables else ""


def _are_accepted(features: tuple[str, ...], keys: tuple[str, ...]) -> bool:
    return len(set(keys)) == len(keys) and set(features) <= set(keys)


@dataclass(frozen=True, kw_only=True)
class WithDropped:
    """The batch that still has the ids that were dropped from a ``Batch``. See :mod:`shardrec.exchange.bad_ids`.

    Args:
        order: (N,) int64 position here per id of the ``Batch``.
        kept: (N,) bool, whether each id is looked up.
        lengths: (F, B) ids per bag, as given.
        values: (N,) ids, wrapped, and 0 where they are not looked up.
    """

    order: Tensor
    kept: Tensor
    lengths: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The tensors of a KeyedJaggedTensor.

    Args:
        keys: F features.
        lengths: (F, B) integer, ids per bag.
        values: (N,) integer.
        weights: (N,) float, or None.
        sizes: batch size per feature, where they differ. Each is at most B.
        inverse: (U, B_full) int64, the bag that each sample of the full batch takes, per feature in use; or None.
        bags: with ``inverse``, the U numbers of bags that it chooses from.
        offsets_fit: 0-d bool, whether the offsets that the input was given match the lengths, or None.
        with_dropped: the batch with the ids that were taken out of this one, or None.
        offsets: (F·B + 1,) of the ids' dtype, where each bag begins, of a batch that was checked on a device; or None.
    """

    keys: tuple[str, ...]
    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    sizes: tuple[int, ...] | None = None
    inverse: Tensor | None = None
    bags: tuple[int, ...] = ()
    offsets_fit: Tensor | None = None
    with_dropped: WithDropped | None = None
    offsets: Tensor | None = None

    def input_positions(self, positions: Tensor) -> Tensor:
        """The positions in the input of the ids at ``positions`` (M,), integer, of this batch."""
        return positions if self.with_dropped is None else self.with_dropped.order.index_select(0, positions)

    @property
    def size(self) -> int:
        """Number of samples B."""
        return self.lengths.size(1)


def read_batch(features: object, expect: Expectation) -> Batch | str:
    """The batch's tensors, or what is wrong with its structure, as far as it shows without reading a tensor.

    torchrec raises an error for some input, because it looks at lengths and values only when asked for them.
    :func:`unreadable` has the words for it.
    """
    if not isinstance(features, KeyedJaggedTensor):
        return f"the input is a {type(features).__name__}. A sharded collection takes a torchrec KeyedJaggedTensor"
    return _read_ordinary(features, expect) or _read(features, expect)


def unreadable(error: Exception) -> str:
    """What is wrong with the input of a :func:`read_batch` that raised ``error``."""
    return (
        f"the KeyedJaggedTensor cannot be read ({type(error).__name__}: {error}). Check how its values and lengths (or "
        "offsets) were built"
    )


def _read_ordinary(features: KeyedJaggedTensor, expect: Expectation) -> Batch | None:
    """:func:`_read` of a batch of the usual form, in as few questions as tell it. None of any other, and of a fault."""
    if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return None
    keys, values, lengths = tuple(features.keys()), features.values(), features.lengths_or_none()
    device = expect.device.type
    if (
        not expect.accepts(keys)
        or lengths is None
        or features.offsets_or_none() is not None
        or lengths.dtype not in _ID_DTYPES
        or values.dtype not in _ID_DTYPES
        or not lengths.dim() == values.dim() == 1
        or not lengths.device.type == values.device.type == device
        or values.numel() > _MAX_IDS
        or features.stride() * len(keys) != lengths.numel()
    ):
        return None
    weights = features.weights_or_none() if expect.weighted else None
    if expect.weighted and (
        weights is None
        or weights.shape != values.shape
        or not weights.dtype.is_floating_point
        or weights.device.type != device
    ):
        return None
    return Batch(keys=keys, lengths=lengths.view(len(keys), -1), values=values, weights=weights) if keys else None


def form_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    """What is wrong with the keys, dtypes, devices or numbers of dimensions: all that shows without a size."""
    keys = tuple(features.keys())
    fault = _key_fault(keys, expect) or _id_fault(features, expect) or _weight_fault(features, expect)
    if fault is not None:
        return fault
    given_lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    lengths = offsets if given_lengths is None else given_lengths
    if lengths is None:
        return (
            "the KeyedJaggedTensor has neither lengths nor offsets. Its third positional argument is weights: pass "
            "lengths="
        )
    if lengths.dtype not in _ID_DTYPES:
        return f"the lengths are {_name(lengths.dtype)}. Lengths (or offsets) must be int32 or int64"
    return _device_fault("lengths", lengths, expect)


def _size_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    values, weights = features.values(), features.weights_or_none() if expect.weighted else None
    if values.numel() > _MAX_IDS:
        return f"the input has {values.numel()} ids and a batch may have {_MAX_IDS}. Make the batch smaller"
    if weights is not None and weights.shape != values.shape:
        shapes = f"the weights have shape {tuple(weights.shape)} and the ids {tuple(values.shape)}"
        return f"{shapes}. Give one weight for each id"
    return None


def length_fault(lengths: Tensor, strides: Sequence[int]) -> str | None:
    """What is wrong with the number of lengths, for the number of keys and their batch sizes."""
    if lengths.dim() == 1 and lengths.numel() == sum(strides):
        return None
    sizes = [int(stride) for stride in strides]  # numbers, also of a tracer's
    samples = f"batch size {sizes[0]}" if len(set(sizes)) == 1 else f"batch sizes {sizes}"
    return (
        f"there are {int(lengths.numel())} lengths for {len(sizes)} features of {samples}. Give exactly one length for "
        "each feature and sample"
    )


def _read(features: KeyedJaggedTensor, expect: Expectation) -> Batch | str:
    keys = tuple(features.keys())
    fault = form_fault(features, expect) or _size_fault(features, expect)
    if fault is not None:
        return fault
    given_lengths, offsets = features.lengths_or_none(), features.offsets_or_none()
    lengths = features.lengths()
    inverse = _inverse(features, expect)
    if isinstance(inverse, str):
        return inverse
    strides = features.stride_per_key() if features.variable_stride_per_key() else [features.stride()] * len(keys)
    fault = length_fault(lengths, strides)
    if fault is not None:
        return fault
    stride_of = dict(zip(keys, strides, strict=True))
    sizes = [stride_of[feature] for feature in expect.features]
    most = max(sizes)
    offsets_fit = None if offsets is None else fit(offsets, given_lengths)
    values, lengths = features.values(), lengths.detach()
    if len(set(strides)) > 1:
        # The ids of a key that no table looks up count as one bag, whatever its batch size.
        bags = {
            key: bags if key in expect.features else bags.sum(dtype=bags.dtype).view(1)[:most]
            for key, bags in zip(keys, lengths.split(strides), strict=True)
        }
        lengths = pad_sequence([*bags.values()], batch_first=True)
        values = values if most else values[:0]
    return Batch(
        keys=keys,
        lengths=lengths.view(len(keys), most),
        values=values,
        weights=features.weights()[: values.numel()] if expect.weighted else None,
        sizes=tuple(stride_of[key] if key in expect.features else most for key in keys) if min(sizes) < most else None,
        inverse=inverse,
        bags=() if inverse is None else tuple(sizes),
        offsets_fit=offsets_fit,
    )


def fit(offsets: Tensor, lengths: Tensor | None) -> Tensor:
    """0-d bool, whether offsets (F·B + 1,) begin at 0 and match the lengths that were given with them, if any.
    TorchScript also compiles it.
    """
    first = offsets[:1] == 0
    if lengths is None:
        return first.all()
    if offsets.numel() != lengths.numel() + 1:
        return torch.zeros_like(first.all())
    return first.all() & (offsets.diff() == lengths).all()


def _inverse(features: KeyedJaggedTensor, expect: Expectation) -> Tensor | str | None:
    """(U, B_full) inverse indices of the features in use, None without any, or what is wrong with them."""
    inverse_indices = (
        features.inverse_indices_or_none() if expect.pooled or features.variable_stride_per_key() else None
    )
    if inverse_indices is None or not inverse_indices[1].numel():
        if not expect.pooled or not features.variable_stride_per_key():
            return None
        strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        sizes = [strides[feature] for feature in expect.features]
        if len(set(sizes)) > 1:
            return (
                f"the features have a batch size each ({sizes}) and no inverse indices, so that "
                "their pooled embeddings cannot stand side by side. Give the KeyedJaggedTensor inverse_indices, or pad "
                "the short features with empty bags"
            )
        return None
    keys, indices = inverse_indices
    missing = [feature for feature in expect.features if feature not in keys]
    if missing or indices.dim() != 2 or indices.size(0) != len(keys) or indices.dtype not in _ID_DTYPES:
        return (
            f"the inverse indices are {_name(indices.dtype)} of shape {tuple(indices.shape)} for {shown(keys)}. Give "
            f"int64 of shape (features, samples) with a row for each of {shown(expect.features)}"
        )
    fault = _device_fault("inverse indices", indices, expect)
    if fault is not None:
        return fault
    rows = staged([keys.index(feature) for feature in expect.features], torch.int64, indices.device)
    chosen: Tensor = indices.detach().index_select(0, rows).to(torch.int64)
    return chosen


def _key_fault(keys: Sequence[str], expect: Expectation) -> str | None:
    present = set(keys)
    if len(present) != len(keys):
        twice = sorted({key for key in keys if keys.count(key) > 1})
        return f"feature(s) {', '.join(map(repr, twice))} come more than once among the keys {shown(keys)}"
    missing = [(key, table) for key, table, _ in expect.tables if key not in present]
    if not missing:
        return None
    named = ", ".join(f"{key!r} (table {table!r})" for key, table in missing[:_MAX_SHOWN_KEYS])
    return (
        f"the input lacks feature(s) {named}. Its keys are {shown(keys)}: rename the key, or give the feature with "
        "empty bags"
    )


def shown(keys: Sequence[str]) -> str:
    """The first dozen keys as text."""
    more = f" and {len(keys) - _MAX_SHOWN_KEYS} more" if len(keys) > _MAX_SHOWN_KEYS else ""
    return f"[{', '.join(map(repr, keys[:_MAX_SHOWN_KEYS]))}{more}]"


def _id_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    values = features.values()
    feature, table, _ = expect.tables[0]
    if values.dtype not in _ID_DTYPES:
        return (
            f"the ids are {_name(values.dtype)} (features from {feature!r} of table {table!r} on{_first(values)}). Ids "
            "must be int32 or int64: convert them with .long()"
        )
    if values.dim() != 1:
        return f"the ids have shape {tuple(values.shape)}. They must be one-dimensional"
    return _device_fault("ids", values, expect)


def _device_fault(what: str, tensor: Tensor, expect: Expectation) -> str | None:
    if tensor.device.type == expect.device.type:
        return None
    feature, table, _ = expect.tables[0]
    return (
        f"the {what} are on {tensor.device} and the tables of this module ({table!r} of feature {feature!r} and on) on "
        f"{expect.device}. Move the batch with .to({str(expect.device)!r})"
    )


def _first(values: Tensor) -> str:
    """The first value as text, if there is a value that can be read."""
    if isinstance(values, FakeTensor) or values.numel() == 0 or values.is_meta:
        return ""
    return f", the first is {values.detach().flatten()[0].item():g}"


def _weight_fault(features: KeyedJaggedTensor, expect: Expectation) -> str | None:
    if not expect.weighted:
        return None  # one KeyedJaggedTensor may serve weighted and unweighted collections, as in TorchRec
    weights = features.weights_or_none()
    feature, table, _ = expect.tables[0]
    if weights is None:
        return (
            f"the input lacks weights and the collection of feature {feature!r} (table {table!r}) has "
            "is_weighted=True. Give the KeyedJaggedTensor weights, one per id"
        )
    if not weights.dtype.is_floating_point:
        name = f"{_name(weights.dtype)}{_first(weights)}"
        return f"the weights are {name}. They must be floating point: convert with .float()"
    return _device_fault("weights", weights, expect)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
