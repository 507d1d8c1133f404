"""Pending values: ``Awaitable`` returns its value from ``wait()``, ``LazyAwaitable`` waits when it is first used.

[Note: which attributes are whose]
An attribute that the awaitable has is read from it, any other from the value. Names that begin *and* end with an
underscore are protocols that libraries probe for (``__cuda_array_interface__``, ``_repr_html_``): probing must not
force a wait, so these are not read from the value, except for the few that only a real conversion reads.

Assignment needs another rule, since a new name may be meant for either. The awaitable gets names that begin with an
underscore, names that it or its class has, and all names during ``__init__()`` and ``_wait_impl()``. The value gets the
others. So ``lazy.requires_grad = True`` sets the tensor's, and a subclass may set private attributes in any method.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Sized
from functools import partial
from typing import Any, Generic, Protocol, Self, SupportsIndex, TypeVar, cast

import torch
import torch.fx
from torch.autograd.profiler import record_function
from torch.fx.node import map_aggregate

from shardrec.errors import AwaitableError
from shardrec.pending.once import Callbacks, Once, State
from shardrec.pending.type_methods import Operators, force, force_nested

W = TypeVar("W")
V = TypeVar("V")
ParentW = TypeVar("ParentW")
KT = TypeVar("KT")
VT_co = TypeVar("VT_co", covariant=True)

_MAY_HOLD_PROXIES = torch.fx.Proxy, tuple, list, dict, slice
_LONGEST_REPR = 60  # characters of the value
_MAX_KEYS = 8  # in a message
_CONVERSIONS = frozenset({"__cuda_array_interface__", "__dlpack__", "__dlpack_device__"})


class Awaitable(abc.ABC, Generic[W]):
    """A pending value of type ``W``, such as the output of a collective that has been started.

    Subclasses implement ``_wait_impl()``, which blocks and returns the value. It runs exactly once, whatever
    the number of calls and threads. Its value (also ``None``) or its error is kept.

    Pickling, copying and deep-copying a finished awaitable give a finished one; for a pending awaitable they raise,
    since the pending operation belongs to this process.

    The interface is TorchRec's ``torchrec.distributed.types.Awaitable``. There, every ``wait()`` runs ``_wait_impl()``.
    """

    _once: Once[W]

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        # Set here and not in __init__, so that a subclass can set its attributes before or after super().__init__().
        self = super().__new__(cls)
        object.__setattr__(self, "_once", Once())
        return self

    def __init__(self) -> None:
        super().__init__()

    @abc.abstractmethod
    def _wait_impl(self) -> W:
        """Blocks until the value exists and returns it. Called once."""

    def _is_ready(self) -> bool:
        """Override to return, without blocking, whether ``_wait_impl()`` would return without blocking."""
        return False

    def wait(self) -> W:
        """The value. The first call blocks. Other threads that call it meanwhile also block, and get the same object.

        Raises:
            AwaitableError: when called from this awaitable's own ``_wait_impl()`` or callbacks.
            BaseException: what ``_wait_impl()`` or a callback raised: the same object, at every call.
        """
        return self._once.resolve(type(self).__name__, self._wait_recorded)

    def done(self) -> bool:
        """True once ``wait()`` returns, or raises, without blocking. Never blocks itself."""
        return self._once.state is not State.PENDING or (not self._once.running_here and self._is_ready())

    @property
    def callbacks(self) -> Callbacks[W]:
        """The callbacks that have not been called yet: a list that TorchRec's code appends to. Empty after the wait."""
        return self._once.callbacks

    def add_callback(self, callback: Callable[[W], W]) -> Self:
        """Replace the value by ``callback(value)``.

        Callbacks run once, in order, at the end of the wait, each on the result of the previous callback. A callback
        that is added after the wait is applied immediately. Earlier callers of ``wait()`` keep the value they got. A
        callback that is added after a failure is never called: the kept error is raised as before. If another thread is
        waiting, this call blocks until that wait has ended.

        Args:
            callback: maps the value to its replacement. An error that it raises is kept as the error of the wait; if
                the callback was applied immediately, the error is raised here and the value stays as it was.

        Returns:
            This awaitable.
        """
        self._once.apply(callback)
        return self

    def then(self, function: Callable[[W], V]) -> LazyAwaitable[V]:
        """An awaitable of ``function(value)``; at its first use it waits for this one and calls ``function``.

        Args:
            function: called once, on this awaitable's value. An error that it raises is the new awaitable's error.
        """
        return Chained(function, self)

    def __repr__(self) -> str:
        """The state, and the value or error if there is one. Does not wait."""
        name, once = type(self).__name__, self._once
        if once.state is State.PENDING:
            return f"<{name} {State.PENDING.value}>"
        text = " ".join(repr(once.error if once.state is State.FAILED else self.wait()).split())
        short = text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 1]}…"
        return f"<{name} {once.state.value}: {short}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Callable[[W], Awaitable[W]], tuple[W]]:
        return self._finished_type(), (self._finished_value("pickled"),)

    def __copy__(self) -> Awaitable[W]:
        return self._finished_type()(copy.copy(self._finished_value("copied")))

    def __deepcopy__(self, memo: dict[int, object]) -> Awaitable[W]:
        return self._finished_type()(copy.deepcopy(self._finished_value("copied"), memo))

    def _wait_recorded(self) -> W:
        if not torch.autograd.profiler._is_profiler_enabled:
            return self._wait_impl()
        # The label is TorchRec's, so that scripts that read its traces also find these waits.
        with record_function(f"## {type(self).__name__} wait() ##"):
            return self._wait_impl()

    def _finished_type(self) -> Callable[[W], Awaitable[W]]:
        return NoWait

    def _finished_value(self, action: str) -> W:
        if not self.done():
            name = type(self).__name__
            raise AwaitableError(f"{name} is still pending and cannot be {action}: call wait() on it first")
        return self.wait()


class NoWait(Awaitable[W]):
    """An awaitable of a value that exists already.

    Args:
        obj: the value.
    """

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj

    def _is_ready(self) -> bool:
        return True


def _first_proxy(values: Any) -> torch.fx.Proxy | None:
    proxies: list[torch.fx.Proxy] = []
    map_aggregate(values, lambda value: proxies.append(value) if isinstance(value, torch.fx.Proxy) else None)
    return proxies[0] if proxies else None


class _LazyAwaitableMeta(abc.ABCMeta, torch.fx.ProxyableClassMeta):
    """Lets ``torch.fx`` record the construction of a lazy awaitable from traced values, and keep one as a constant."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # Not ProxyableClassMeta's own __call__, which reads a global flag for every object and so warns on stderr. A
        # proxy among the arguments shows the same.
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, _MAY_HOLD_PROXIES):
                proxy = _first_proxy((args, kwargs))
                if proxy is not None:
                    return proxy.tracer.create_proxy("call_function", cls, args, kwargs)
                break
        created = type.__call__(cls, *args, **kwargs)
        if isinstance(created, cls):
            object.__setattr__(created, "_is_made", True)
        return created


class LazyAwaitable(Awaitable[W], Operators, metaclass=_LazyAwaitableMeta):
    """An awaitable that waits when it is first used as its value.

    It acts as its value in torch functions (as an argument, at any depth of lists and dicts), attributes, items,
    operators, iteration, conversions to numbers, text and numpy arrays, calls and ``with``. The first of these waits.
    These do not wait: ``repr()``, ``isinstance()``, ``done()``, ``then()``, and passing it on. Its own names (``wait``,
    ``done``, ``then``, ``callbacks``, ``add_callback``) hide the value's names.

    It is not a tensor: ``isinstance(lazy, torch.Tensor)`` is false, and code that tests for it takes another path. A
    ``torch.autograd.Function`` computes a value but passes no gradient on. Give such code ``shardrec.wait(lazy)``. Do
    the same for a pending number where torch takes one int or several (``x.sum(lazy)``), which fails inside torch.

    The idea and the interface are TorchRec's ``torchrec.distributed.types.LazyAwaitable``. The semantics are the
    semantics of a call-by-need thunk.
    """

    _is_made = False
    _result: object = None
    """The attribute in which TorchRec's ``LazyAwaitable._wait_async`` keeps the value of an awaitable."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., V],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> V:
        """Waits for every lazy awaitable among the arguments, in order, then calls ``func`` on the values."""
        return func(*force_nested(args), **force_nested(kwargs or {}))

    @staticmethod
    def _wait_async(obj: object) -> object:
        """TorchRec's name for :func:`~shardrec.pending.type_methods.force`."""
        return force(obj)

    def __getattr__(self, name: str) -> Any:
        # Only for names that are not found otherwise. See [Note: which attributes are whose].
        if name.startswith("_") and name.endswith("_") and name not in _CONVERSIONS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if not self._is_made or self._once.running_here:
            where = "_wait_impl() or a callback runs" if self._is_made else "__init__() runs"
            text = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(f"{text}, and its value cannot be asked while {where}", name=name, obj=self)
        return getattr(self.wait(), name)

    def __setattr__(self, name: str, value: object) -> None:
        if name.startswith("_") or self._owns(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.wait(), name, force(value))

    def __delattr__(self, name: str) -> None:
        if self._owns(name):
            object.__delattr__(self, name)
        else:
            delattr(self.wait(), name)

    def _owns(self, name: str) -> bool:
        return (
            name.startswith("_")
            or not self._is_made
            or name in self.__dict__
            or hasattr(type(self), name)
            or self._once.running_here
        )

    def _finished_type(self) -> Callable[[W], Awaitable[W]]:
        return LazyNoWait


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A lazy awaitable of a value that exists already.

    Args:
        obj: the value.
    """


class _Waitable(Protocol):
    """A future or an awaitable."""

    def wait(self) -> object: ...

    def done(self) -> bool: ...


class Chained(LazyAwaitable[V]):
    """A function of other pending values. Its first use waits for these, one after the other."""

    def __init__(self, function: Callable[..., V], *parents: _Waitable) -> None:
        super().__init__()
        self._function: Callable[..., V] | None = function
        self._parents = parents

    def _wait_impl(self) -> V:
        function, parents = self._function, self._parents
        assert function is not None, "_wait_impl() runs once"
        # Drop the references to both: either can hold buffers that the value does not need.
        self._function, self._parents = None, ()
        return function(*[parent.wait() for parent in parents])

    def _is_ready(self) -> bool:
        return self._function is not None and all(parent.done() for parent in self._parents)


class LazyGetItemMixin(Generic[KT, VT_co]):
    """Makes ``lazy[key]`` an awaitable of the item, without waiting for the collection.

    For awaitables of keyed collections, such as ``KeyedTensor`` or ``dict``: a model can select its features before the
    collective that delivers them has ended. A missing key raises at the first use of the item.

    List it before ``LazyAwaitable`` among the bases, so that its ``__getitem__`` takes precedence::

        class FeaturesAwaitable(LazyGetItemMixin[str, Tensor], LazyAwaitable[KeyedTensor]): ...

    The idea and the interface are TorchRec's ``torchrec.distributed.types.LazyGetItemMixin``.
    """

    def __getitem__(self, key: KT) -> LazyAwaitable[VT_co]:
        return GetItemLazyAwaitable(cast("LazyAwaitable[Any]", self), key)


class GetItemLazyAwaitable(Chained[W], Generic[W, ParentW, KT]):
    """The item of a pending collection.

    Args:
        parent: the awaitable of the collection.
        key: key or index of the item.

    Raises:
        KeyError, IndexError: at the first use, if the collection has no such item. The message lists its keys.
    """

    def __init__(self, parent: LazyAwaitable[ParentW], key: KT) -> None:
        super().__init__(partial(_item, key, type(parent).__name__), parent)


class _Items(Protocol):
    def __getitem__(self, key: Any, /) -> Any: ...


def _item(key: object, parent: str, collection: _Items) -> Any:
    try:
        return collection[key]
    except (KeyError, IndexError) as error:
        text = f"{type(collection).__name__} of {parent} has no item {key!r}"
        raise type(error)(text + _its_keys(collection)) from error


def _its_keys(collection: object) -> str:
    asked = getattr(collection, "keys", None)
    if not callable(asked):
        return f". Its length is {len(collection)}" if isinstance(collection, Sized) else ""
    keys = list(map(repr, asked()))
    more = f" and {len(keys) - _MAX_KEYS} more" if len(keys) > _MAX_KEYS else ""
    return f". It has {', '.join(keys[:_MAX_KEYS]) or 'none'}{more}"
