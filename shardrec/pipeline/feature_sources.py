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
    arguments: tuple[tuple[object, ...], Mapping[str, object]]
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
    """A batch, and the outputs of the post-processors that have run on it ahead of its step."""

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._outputs: dict[PostProcessor, tuple[object, object]] = {}  # with the arguments
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


class ForwardRecord:
    """What a forward shows of where its values come from. It is made before the forward.

    Attributes:
        calls: the calls inside of :meth:`calls_of`.
    """

    def __init__(self, batch: object) -> None:
        self._batch, self._before = batch, dict(_held(batch))
        self.calls: list[ModuleCall] = []
        self._makers: dict[ModuleCall, PostProcessor | None] = {}

    @contextmanager
    def calls_of(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Inside, record the calls of the modules that could run ahead.

        Args:
            model: its modules are watched, except modules inside compiled ones.
            device: of the model.
        """

        def record(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], output: object) -> None:
            if not torch.is_autocast_enabled(device.type) and not _takes_gradients(output):
                self.calls.append(ModuleCall(module, (args, kwargs), output, GradMode.current()))

        with ExitStack() as stack:
            for module in _movable(model):
                stack.callback(module.register_forward_hook(record, with_kwargs=True).remove)
            yield

    def source(self, value: object) -> Source | None:
        """Where a value of the forward comes from. None if the model makes it in another way."""
        return self._source(value, self.calls)

    def _source(self, value: object, calls: Sequence[ModuleCall]) -> Source | None:
        place = _place(value, self._before.items())
        if place is None:  # a batch may make it when it is asked for the first time
            place = _place(value, _held(self._batch))
            if place in self._before:  # the forward has replaced what was there
                return None
        if place is not None:
            return Source(None, _path(place))
        for number, call in enumerate(calls):
            place = _place(value, _held(call.output))
            if place is None:
                continue
            if call not in self._makers:
                self._makers[call] = self._maker(call, calls[:number])
            if maker := self._makers[call]:
                return Source(maker, _path(place))
        return None

    def _maker(self, call: ModuleCall, before: Sequence[ModuleCall]) -> PostProcessor | None:
        """A call that has ended after those ``before``, as one that can be made ahead. None if it cannot."""

        def argument(value: object) -> Source:
            if isinstance(value, _CONSTANTS):
                return Source(None, [lambda _: value])
            source = self._source(value, before)
            if source is None:
                raise _Unknown
            return source

        with suppress(_Unknown):
            return PostProcessor(call.module, tree_map(argument, call.arguments, is_leaf=_is_leaf), call.mode)
        return None


class _Unknown(Exception):
    """An argument comes from nowhere that is known."""


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
    has_tables = any(isinstance(part, ShardedCollection) for part in module.modules())
    if not has_tables and not any(parameter.requires_grad for parameter in module.parameters()):
        yield module
    for child in module.children():
        yield from _movable(child)


_Getter = Callable[[Any], Callable[[Any], object]]
_Place = tuple[tuple[_Getter, Any], ...]
"""Keys of items and names of attributes, each in the value before."""


def _path(place: _Place) -> list[Callable[[Any], object]]:
    return [getter(key) for getter, key in place]


def _place(wanted: object, places: Iterable[tuple[_Place, object]]) -> _Place | None:
    return next((place for place, value in places if value is wanted), None)


def _held(root: object, deepest: int = _DEEPEST) -> Iterator[tuple[_Place, object]]:
    """A value and the objects in it, each with its place."""
    yield (), root
    if not deepest or isinstance(root, (Tensor, KeyedJaggedTensor, KeyedTensor, JaggedTensor, str, bytes)):
        return
    getter: _Getter = itemgetter
    keys: Iterable[Any]
    if isinstance(root, Mapping):
        keys = root
    elif isinstance(root, (tuple, list)):
        keys = range(len(root))
    else:
        getter, keys = attrgetter, [*getattr(root, "__dict__", {}), *getattr(type(root), "__slots__", ())]
    for key in keys:
        with suppress(LookupError, AttributeError, TypeError):
            for place, value in _held(getter(key)(root), deepest - 1):
                yield ((getter, key), *place), value
