"""A model behind a ``forward`` of plain tensors, for callers without a KeyedJaggedTensor."""

from __future__ import annotations

import inspect
import keyword
import typing
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._torchscript import forward_of
from shardrec.errors import ConfigError
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedModel
from shardrec.modules.collection import ShardedCollection

_NUMBERS = count()
_RESERVED = ("self", "torch", "Tensor", "KeyedJaggedTensor")

Features: TypeAlias = Sequence[str] | Mapping[str, Sequence[str]]
"""The keys of the model's KeyedJaggedTensor. If the model takes several, by the parameter's name."""


class Entry(nn.Module):
    """Base of the entries that :func:`from_tensors` makes.

    Attributes:
        features: the ``features`` that :func:`from_tensors` was given.
    """

    # torch.jit reads this name: TorchScript leaves these attributes out.
    __jit_ignored_attributes__: typing.ClassVar = ["inputs", "features"]

    def __init__(self, model: nn.Module, keys: Mapping[str, list[str]], inputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.keys = list(keys.values())
        self.inputs = tuple(inputs)
        self.features = dict(keys) if len(keys) > 1 else self.keys[0]


def from_tensors(model: nn.Module, features: Features) -> Entry:
    """Wrap a model in a module that builds the KeyedJaggedTensor from plain tensors and runs without gradients.

    Its ``forward`` takes these tensors, in this order:

    - ``values`` (N,) int32 or int64, the ids: of the first feature, sample after sample, then of the second, ...;
    - ``lengths`` (F·B,) int32 or int64, the number of ids of each feature and sample, in the same order;
    - ``weights`` (N,) float32, one per id. Only if a weighted collection looks up one of the features;
    - the other arguments of the model's ``forward``, under their own names.

    It returns the model's output, and ``shardrec.script`` can compile it. If the model takes several
    KeyedJaggedTensors, the first three are repeated for each, prefixed by the parameter's name: ``user_values``,
    ``user_lengths``, ...

    Args:
        model: a sharded model, or a module that holds one. At least one parameter of its ``forward`` is annotated
            ``KeyedJaggedTensor``. The others are annotated ``Tensor`` or have a default.
        features: the F keys of the KeyedJaggedTensor, by the parameter's name if there are several. They include every
            key that the model looks up.

    Raises:
        ConfigError: if the model has another signature, or if ``features`` lacks a key or repeats one.
    """
    inner = model.module if isinstance(model, ShardedModel) else model
    collections = [child for child in inner.modules() if isinstance(child, ShardedCollection)]
    arguments = _arguments(inner)
    keys = _keys_of(inner, features, [name for name, is_jagged in arguments.items() if is_jagged])
    _check_features(keys, collections)
    looked_up_weighted = {
        feature
        for child in collections
        if isinstance(child, ShardedEmbeddingBagCollection) and child.is_weighted()
        for feature in child.input.expect.features
    }
    inputs: list[str] = []
    lines: list[str] = []
    jagged: dict[str, str] = {}
    for number, (name, feature_names) in enumerate(keys.items()):
        prefix = "" if len(keys) == 1 else f"{name}_"
        tensors = ["values", "lengths", *([] if looked_up_weighted.isdisjoint(feature_names) else ["weights"])]
        inputs += [f"{prefix}{tensor}" for tensor in tensors]
        jagged[name] = f"_jagged{number}"
        keyword_arguments = ", ".join(f"{tensor}={prefix}{tensor}" for tensor in tensors)
        lines.append(f"    {jagged[name]} = KeyedJaggedTensor(self.keys[{number}], {keyword_arguments})\n")
    dense = [name for name, is_jagged in arguments.items() if not is_jagged]
    clashes = [name for name in dense if name in inputs or name in _RESERVED or keyword.iskeyword(name)]
    if clashes:
        raise _unfit(inner, f"its {clashes[0]!r} has the name of an argument that the entry has already")
    inputs += dense
    lines = [
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in inputs)}):\n",
        *lines,
        "    with torch.no_grad():\n",
        f"        return self.model({', '.join(f'{name}={jagged.get(name, name)}' for name in arguments)})\n",
    ]
    # TorchScript reads a function's source. Each entry has its own arguments, so its source is generated.
    source = f"<shardrec.serve entry {next(_NUMBERS)}>"
    forward = forward_of(lines, source, torch=torch, Tensor=Tensor, KeyedJaggedTensor=KeyedJaggedTensor)
    cls = type("TensorEntry", (Entry,), {"forward": forward, "__module__": __name__})
    entry: Entry = cls(model, keys, inputs)
    return entry.train(model.training)


def _keys_of(module: nn.Module, features: Features, parameters: Sequence[str]) -> dict[str, list[str]]:
    """The keys per KeyedJaggedTensor, by its parameter."""
    if not isinstance(features, Mapping):
        if len(parameters) > 1:
            example = ", ".join(f"{name!r}: [...]" for name in parameters)
            raise ConfigError(
                f"{type(module).__name__}.forward takes {len(parameters)} KeyedJaggedTensors: say which has which "
                f"keys, with features={{{example}}}"
            )
        return {parameters[0]: list(features)}
    if set(features) != set(parameters):
        raise ConfigError(
            f"features is for {', '.join(map(repr, features)) or 'nothing'}, and {type(module).__name__}.forward takes "
            f"KeyedJaggedTensors as {', '.join(map(repr, parameters))}: give the keys of each"
        )
    return {name: list(features[name]) for name in parameters}


def _check_features(features: Mapping[str, Sequence[str]], collections: Sequence[ShardedCollection]) -> None:
    for keys in features.values():
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise ConfigError(f"features has {', '.join(map(repr, twice))} more than once: name each key once")
    needed = dict.fromkeys(feature for child in collections for feature in child.input.expect.features)
    missing = [key for key in needed if not any(key in keys for keys in features.values())]
    if missing:
        raise ConfigError(
            f"features lacks {', '.join(map(repr, missing))}, which the model looks up: name every key that requests "
            "will have, in their order"
        )


def _arguments(module: nn.Module) -> dict[str, bool]:
    """The arguments of ``forward`` by name, and whether each is a KeyedJaggedTensor. The others are tensors."""
    forward = type(module).forward
    try:
        hints = typing.get_type_hints(forward)
    except Exception as error:  # whatever the user's annotations raise
        raise ConfigError(
            f"the annotations of {type(module).__name__}.forward cannot be read ({error}): import their names in its "
            "module, and not under TYPE_CHECKING"
        ) from error
    is_jagged: dict[str, bool] = {}
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        kind = hints.get(parameter.name, Tensor)
        if kind is not KeyedJaggedTensor:
            if parameter.default is not parameter.empty:
                continue
            if kind is not Tensor or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise _unfit(module, f"its {parameter.name!r} is neither a KeyedJaggedTensor nor a Tensor")
        is_jagged[parameter.name] = kind is KeyedJaggedTensor
    if not any(is_jagged.values()):
        raise _unfit(module, "it takes no parameter annotated KeyedJaggedTensor")
    return is_jagged


def _unfit(module: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__}.forward cannot be given plain tensors by shardrec.serve: {reason}. Put the model "
        "into a module with a forward that takes annotated KeyedJaggedTensors and tensors, or script your own entry"
    )
