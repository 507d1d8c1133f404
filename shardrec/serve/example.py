"""An example call, as plain tensors: the arguments of an entry, and which of their sizes change from call to call.

Shapes: F features, B samples, N ids.

[Note: sizes that stand for all sizes]
A tracer concludes from an example that equal sizes are always equal, and it specializes on 0 and 1. So it is not given
the caller's tensors but zeros with sizes that occur nowhere else in a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypedDict

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.serve.entry import Entry, from_tensors

_SAMPLES, _IDS = 7, 23


class TensorNote(TypedDict):
    """A :class:`TensorSpec` as JSON values."""

    name: str
    dtype: str
    shape: list[int | str]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one argument of a call.

    Args:
        name: name of the argument.
        dtype: dtype of the tensor.
        shape: per dimension a number, or a multiple of the samples (``"B"``, ``"4*B"``) or of the ids (``"N"``).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | str, ...]

    def note(self) -> TensorNote:
        """This spec as JSON values."""
        return {"name": self.name, "dtype": str(self.dtype).removeprefix("torch."), "shape": list(self.shape)}

    @classmethod
    def of_note(cls, note: TensorNote) -> TensorSpec:
        """The spec that :meth:`note` converted."""
        return cls(name=note["name"], dtype=getattr(torch, note["dtype"]), shape=tuple(note["shape"]))

    def fault(self, shape: tuple[int, ...], sizes: dict[str, int]) -> str:
        """A message about a tensor's shape that does not fit. Empty if it fits.

        Args:
            shape: the tensor's shape.
            sizes: values of "B" and "N" so far. The first tensor that has one sets it for the others.
        """
        if len(shape) != len(self.shape):
            return self._refusal(shape)
        for size, part in zip(shape, self.shape, strict=True):
            if isinstance(part, int):
                if size != part:
                    return self._refusal(shape)
                continue
            factor = _factor(part)
            if size % factor:
                return f"{self._refusal(shape)}, and {size} is not a multiple of {factor}"
            known = sizes.setdefault(part[-1], size // factor)
            if size != factor * known:
                return f"{self._refusal(shape)}, where {part[-1]} is {known} by the tensors before it"
        return ""

    def _refusal(self, shape: tuple[int, ...]) -> str:
        return f"{self.name} has the shape {list(shape)}. The model takes [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, kw_only=True)
class Example:
    """An entry and the specs of its arguments, from which tensors for a tracer are made."""

    entry: Entry
    specs: tuple[TensorSpec, ...]
    device: torch.device

    def tensors(self, samples: int = _SAMPLES, ids: int = _IDS) -> tuple[Tensor, ...]:
        """Zeros for integer arguments and random values for floating ones. The default sizes occur nowhere else."""
        sizes = {"B": samples, "N": ids}
        tensors = []
        for spec in self.specs:
            shape = [size if isinstance(size, int) else _factor(size) * sizes[size[-1]] for size in spec.shape]
            tensor = torch.zeros(shape, dtype=spec.dtype, device=self.device)
            tensors.append(tensor.uniform_() if tensor.is_floating_point() else tensor)
        return tuple(tensors)

    def dynamic_shapes(self) -> tuple[dict[int, torch.export.Dim], ...]:
        """The ``dynamic_shapes`` argument of ``torch.export.export``."""
        dims = {name: torch.export.Dim(name, min=0) for name in ("B", "N")}

        def changing(size: str) -> torch.export.Dim:
            return dims[size] if size in dims else _factor(size) * dims[size[-1]]

        return tuple(
            {dim: changing(size) for dim, size in enumerate(spec.shape) if isinstance(size, str)} for spec in self.specs
        )


@lru_cache
def _factor(size: str) -> int:
    return int(size[:-1].removesuffix("*") or 1)


def example_of(
    model: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    static: Sequence[str] = (),
) -> Example:
    """Make a model's entry and the specs of its arguments from an example call of the model.

    Arguments as for :func:`shardrec.export`.

    Raises:
        ConfigError: if the call does not fit the model's ``forward``, if each feature has a batch size of its own, or
            if a tensor's first dimension is not the samples.
    """
    inner = getattr(model, "module", model)
    try:
        bound = inspect.signature(inner.forward).bind(*args, **(kwargs or {})).arguments
    except TypeError as error:
        raise ConfigError(
            f"the example does not fit {type(inner).__name__}.forward ({error}): give the arguments of a call of it"
        ) from error
    jagged = [value for value in bound.values() if isinstance(value, KeyedJaggedTensor)]
    if len(jagged) != 1:
        raise ConfigError(
            f"the example of a call of {type(inner).__name__} has {len(jagged)} KeyedJaggedTensors, not one: put the "
            "model into a module with a forward that takes one"
        )
    features = jagged[0]
    if features.variable_stride_per_key():
        raise ConfigError(
            "the example's features have a batch size each, which an exported model does not take: give a "
            "KeyedJaggedTensor with one"
        )
    entry = from_tensors(model, features.keys())
    unknown = sorted(set(static) - set(entry.inputs[2:]))
    if unknown:
        raise ConfigError(
            f"static names {', '.join(map(repr, unknown))}. The tensors besides the features are "
            f"{', '.join(map(repr, entry.inputs[2:])) or 'none'}: use their names"
        )
    dense = [name for name, value in bound.items() if isinstance(value, Tensor)]
    specs = []
    for name in entry.inputs:
        if name in ("values", "lengths", "weights") and name not in dense:
            if name == "weights" and features.weights_or_none() is None:
                raise ConfigError(
                    "the example's features lack weights, and a weighted collection looks them up: give a "
                    "KeyedJaggedTensor with weights"
                )
            tensor = getattr(features, name)()
            bags = "B" if len(features.keys()) == 1 else f"{len(features.keys())}*B"
            size = bags if name == "lengths" else "N"
            specs.append(TensorSpec(name=name, dtype=tensor.dtype, shape=(size,)))
        else:
            specs.append(_dense_spec(name, bound.get(name), features.stride(), name in static))
    return Example(entry=entry, specs=tuple(specs), device=features.values().device)


def _dense_spec(name: str, value: object, samples: int, is_static: bool) -> TensorSpec:
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{name!r} of the example is a {type(value).__name__}, and an exported model takes tensors: give one"
        )
    if is_static:
        return TensorSpec(name=name, dtype=value.dtype, shape=tuple(value.shape))
    if value.dim() == 0 or value.size(0) != samples:
        raise ConfigError(
            f"{name!r} of the example has the shape {tuple(value.shape)} and the features have {samples} samples: its "
            f"first dimension has to be the samples; if its size never changes, say static=[{name!r}]"
        )
    return TensorSpec(name=name, dtype=value.dtype, shape=("B", *value.shape[1:]))
