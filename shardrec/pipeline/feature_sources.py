"""Where a model takes its features from: the batch, or modules that make them of it, which can run ahead of their step.

::

    model(batch)                           seen in a step           ahead of a later step
      features = self.sample(batch.kjt)    a call of `sample`       made of the batch; the step takes its output
      rows = self.embeddings(features)     features: of that call   begun with the output

A module that makes features is a *post-processor*, as in TorchRec. It can run ahead if its arguments come from the
batch, or from other post-processors, and if training changes nothing in it: no parameter takes a gradient, and it holds
no sharded collection. If its step calls it with other arguments, it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from shardrec.modules.collection import ShardedCollection
from shardrec.modules.compiled import leaves
from shardrec.step.records import GradMode

__all__ = ["ModuleCall", "PostProcessed", "Source", "recorded_calls", "sources_of"]

_DEEPEST = 4
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(eq=False)
class ModuleCall:
    """A call of a module in a forward.

    Args:
        module: that was called.
        arguments: positional and keyword arguments.
        output: that it returned.
        mode: in which it was called.
    """

    module: nn.Module
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    output: object
    mode: GradMode


@dataclass(eq=False)
class PostProcessor:
    """A module that makes features, and where its arguments come from.

    Args:
        module: of the model.
        arguments: as of :class:`ModuleCall`, with a :class:`Source` instead of each value.
        mode: in which the model calls it.
    """

    module: nn.Module
    arguments: Any
    mode: GradMode


@dataclass(eq=False)
class Source:
    """Where a value comes from.

    Args:
        maker: the post-processor with the value in its output. None for the batch.
        path: to the value: an item or an attribute, an item or an attribute of that, and so on.
    """

    maker: PostProcessor | None
    path: Sequence[Callable[[Any], object]]

    def makers(self) -> Iterator[PostProcessor]:
        """The post-processors that it takes, in the order in which they run."""
        if self.maker is not None:
            for source in tree_leaves(self.maker.arguments):
                yield from source.makers()
            yield self.maker


class PostProcessed:
    """A batch, and the outputs of the post-processors that have run on it ahead of its step.

    Args:
        batch: on the device.
    """

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._outputs: dict[PostProcessor, tuple[Any, object]] = {}  # with the arguments
        self._left: list[PostProcessor] = []

    def value(self, source: Source) -> object:
        """The value of a source. None if the batch lacks it. Runs the post-processors that it takes, once each."""
        root = self._batch if source.maker is None else self._output(source.maker)
        with suppress(LookupError, AttributeError, TypeError):
            for step in source.path:
                root = step(root)
            return root
        return None

    def _output(self, maker: PostProcessor) -> object:
        if maker not in self._outputs:
            arguments = args, kwargs = tree_map(self.value, maker.arguments)
            with maker.mode.entered():
                self._outputs[maker] = arguments, maker.module(*args, **kwargs)
            self._left.append(maker)
        return self._outputs[maker][1]

    @property
    def outputs(self) -> list[object]:
        """What the post-processors returned."""
        return [output for _, output in self._outputs.values()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, a post-processor that is called with the arguments of here returns the output of here, once.

        ``forward`` of the instance is replaced for the step, because a forward pre-hook cannot skip ``forward`` and a
        forward hook runs after it. Another module in its place would hide the attributes that the model reads of it.
        """
        with ExitStack() as stack:
            for module in {maker.module: None for maker in self._outputs}:
                forward = module.forward
                had_own = "forward" in vars(module)
                module.forward = partial(self._take, module, forward)
                stack.callback(setattr if had_own else _drop, module, "forward", forward)
            yield

    def _take(self, module: nn.Module, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        for place, maker in enumerate(self._left):
            if maker.module is module and _are_same(self._outputs[maker][0], (args, kwargs)):
                del self._left[place]
                return self._outputs[maker][1]
        return forward(*args, **kwargs)


def _drop(module: nn.Module, name: str, _: object) -> None:
    delattr(module, name)


@contextmanager
def recorded_calls(model: nn.Module, device: torch.device) -> Iterator[list[ModuleCall]]:
    """Inside, calls of the modules that could run ahead are appended to the list.

    Args:
        model: its modules are watched, except modules inside compiled ones.
        device: of the model.
    """
    calls: list[ModuleCall] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if not torch.is_autocast_enabled(device.type) and not _takes_gradients(output):
            calls.append(ModuleCall(module, (args, kwargs), output, GradMode.current()))

    with ExitStack() as stack:
        for module in _movable(model):
            stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


def sources_of(values: Iterable[object], batch: object, calls: Sequence[ModuleCall]) -> list[Source | None]:
    """Where each value comes from. None where the model makes it in another way."""
    makers: dict[ModuleCall, PostProcessor | None] = {}
    return [_source(value, batch, calls, makers) for value in values]


class _Unknown(Exception):
    """An argument comes from nowhere that is known."""


def _source(
    value: object, batch: object, calls: Sequence[ModuleCall], makers: dict[ModuleCall, PostProcessor | None]
) -> Source | None:
    path = _path(batch, value)
    if path is not None:
        return Source(None, path)
    for number, call in enumerate(calls):
        path = _path(call.output, value)
        if path is None:
            continue
        if call not in makers:
            makers[call] = _maker(call, batch, calls[:number], makers)
        if maker := makers[call]:
            return Source(maker, path)
    return None


def _maker(
    call: ModuleCall, batch: object, before: Sequence[ModuleCall], makers: dict[ModuleCall, PostProcessor | None]
) -> PostProcessor | None:
    """A call that has ended after those ``before``, as one that can be made ahead. None if it cannot."""

    def argument(value: object) -> Source:
        if isinstance(value, _CONSTANTS):
            return Source(None, [lambda _: value])
        source = _source(value, batch, before, makers)
        if source is None:
            raise _Unknown
        return source

    with suppress(_Unknown):
        return PostProcessor(call.module, tree_map(argument, call.arguments, is_leaf=_is_leaf), call.mode)
    return None


def _is_leaf(value: object) -> bool:
    """Whether a value is passed on as it is: tensors and batches, whatever they hold."""
    return not isinstance(value, (tuple, list, dict))


def _are_same(arguments: object, now: object) -> bool:
    (values, form), (others, other_form) = (tree_flatten(each, is_leaf=_is_leaf) for each in (arguments, now))
    return form == other_form and all(
        a is b or (isinstance(a, _CONSTANTS) and type(a) is type(b) and a == b)
        for a, b in zip(values, others, strict=True)
    )


def _takes_gradients(output: object) -> bool:
    """Whether a gradient would flow into an output. For a jagged tensor, into the ids' weights."""
    tensors = [
        leaf.weights_or_none() if isinstance(leaf, (KeyedJaggedTensor, JaggedTensor)) else leaf
        for leaf in leaves(output)
    ]
    return any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _movable(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside that training does not change."""
    if hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule):  # others run its forward
        return
    held = any(isinstance(part, ShardedCollection) for part in module.modules())
    if not held and not any(parameter.requires_grad for parameter in module.parameters()):
        yield module
    for child in module.children():
        yield from _movable(child)


def _path(root: object, wanted: object, deepest: int = _DEEPEST) -> list[Callable[[Any], object]] | None:
    """The path from a value to this object in it."""
    if root is wanted:
        return []
    if not deepest or isinstance(root, (Tensor, KeyedJaggedTensor, KeyedTensor, JaggedTensor, str, bytes)):
        return None
    steps: Iterable[Callable[[Any], object]]
    if isinstance(root, Mapping):
        steps = map(itemgetter, root)
    elif isinstance(root, (tuple, list)):
        steps = map(itemgetter, range(len(root)))
    else:
        steps = map(attrgetter, [*getattr(root, "__dict__", {}), *getattr(type(root), "__slots__", ())])
    for step in steps:
        with suppress(LookupError, AttributeError, TypeError):
            rest = _path(step(root), wanted, deepest - 1)
            if rest is not None:
                return [step, *rest]
    return None
