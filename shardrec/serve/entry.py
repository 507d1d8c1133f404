"""An entry to a model that takes plain tensors, for programs that know no KeyedJaggedTensor."""

from __future__ import annotations

import inspect
import keyword
import linecache
import typing
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedModel
from shardrec.modules.collection import ShardedCollection

__all__ = ["Entry", "from_tensors"]

_NUMBERS = count()
_OWN = ("values", "lengths", "weights")


class Entry(nn.Module):
    """Base of the entries that :func:`from_tensors` makes.

    Args:
        model: what is called.
        features: the keys, in the order of the lengths.
        inputs: names of the arguments.
    """

    # What is for Python only, by the name under which torch.jit looks for it.
    __jit_ignored_attributes__: typing.ClassVar = ["inputs"]

    def __init__(self, model: nn.Module, features: Sequence[str], inputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.features = list(features)
        self.inputs = tuple(inputs)


def from_tensors(model: nn.Module, features: Sequence[str]) -> Entry:
    """A module that makes the model's KeyedJaggedTensor from plain tensors and calls the model, without gradients.

    Its ``forward`` takes, in this order, each a tensor:

    - ``values`` (N,) int32 or int64, the ids: those of the first feature, sample after sample, then of the second, ...;
    - ``lengths`` (F·B,) int32 or int64, the number of ids of each feature and sample, in the same order;
    - ``weights`` (N,) float32, one per id; only of a model whose collections are weighted;
    - what the model's ``forward`` takes besides, under its own names.

    and returns what the model returns. ``shardrec.script`` takes it.

    Args:
        model: one of whose ``forward``'s parameters is annotated ``KeyedJaggedTensor``, and the others, as far as they
            have no default, ``Tensor``.
        features: the F keys of the KeyedJaggedTensor; all that the model looks up are among them.

    Raises:
        ConfigError: for a model with another signature, or features that lack one, or come twice.
    """
    keys = list(features)
    inner = model.module if isinstance(model, ShardedModel) else model
    collections = [child for child in inner.modules() if isinstance(child, ShardedCollection)]
    _check_features(keys, collections)
    weighted = any(child.is_weighted() for child in collections if isinstance(child, ShardedEmbeddingBagCollection))
    passed, dense = _arguments(inner)
    inputs = ["values", "lengths", *(["weights"] if weighted else []), *dense]
    given = "weights=weights, " if weighted else ""
    lines = [
        f"def forward(self, {', '.join(f'{name}: Tensor' for name in inputs)}):\n",
        f"    features = KeyedJaggedTensor(self.features, values, {given}lengths=lengths)\n",
        "    with torch.no_grad():\n",
        f"        return self.model({', '.join(passed)})\n",
    ]
    # TorchScript reads the source, and each model needs arguments of its own.
    source = f"<shardrec.serve entry {next(_NUMBERS)}>"
    linecache.cache[source] = (sum(map(len, lines)), None, lines, source)
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor, "KeyedJaggedTensor": KeyedJaggedTensor}
    exec(compile("".join(lines), source, "exec"), names)
    cls = type("TensorEntry", (Entry,), {"forward": names["forward"], "__module__": __name__})
    entry: Entry = cls(model, keys, inputs)
    return entry.train(model.training)


def _check_features(keys: Sequence[str], collections: Sequence[ShardedCollection]) -> None:
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ConfigError(f"features has {', '.join(map(repr, twice))} more than once: name each key once")
    needed: dict[str, None] = {}
    for child in collections:
        if isinstance(child, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            needed.update(dict.fromkeys(child.input.expect.features))
    missing = [key for key in needed if key not in keys]
    if missing:
        raise ConfigError(
            f"features lacks {', '.join(map(repr, missing))}, which the model looks up: name every key that requests "
            "will have, in their order"
        )


def _arguments(module: nn.Module) -> tuple[list[str], list[str]]:
    """The call's arguments, and the names of those that are tensors."""
    forward = type(module).forward
    try:
        hints = typing.get_type_hints(forward)
    except Exception as error:  # whatever the user's annotations raise
        raise ConfigError(
            f"the annotations of {type(module).__name__}.forward cannot be read ({error}): import their names in its "
            "module, and not under TYPE_CHECKING"
        ) from error
    passed, dense, jagged = [], [], 0
    for parameter in list(inspect.signature(forward).parameters.values())[1:]:
        kind = hints.get(parameter.name, Tensor)
        name = parameter.name
        value = name
        if kind is KeyedJaggedTensor:
            value, jagged = "features", jagged + 1
        elif parameter.default is not parameter.empty:
            continue
        elif kind is not Tensor or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise _unfit(module, f"its {name!r} is neither a KeyedJaggedTensor nor a Tensor")
        elif name in (*_OWN, "features", "self", "torch") or keyword.iskeyword(name):
            raise _unfit(module, f"its {name!r} has the name of an argument that the entry has already")
        else:
            dense.append(name)
        passed.append(f"{name}={value}")
    if jagged != 1:
        raise _unfit(module, f"it takes {jagged} parameters annotated KeyedJaggedTensor, not one")
    return passed, dense


def _unfit(module: nn.Module, reason: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__}.forward cannot be given plain tensors by shardrec.serve: {reason}. Put the model "
        "into a module whose forward takes one KeyedJaggedTensor, annotated so, and tensors; or script your own entry"
    )
