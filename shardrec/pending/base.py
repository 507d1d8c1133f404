"""A value on its way: ``wait()`` gives it."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, SupportsIndex, TypeVar

from torch.autograd.profiler import record_function

from shardrec.pending.callbacks import Callbacks
from shardrec.pending.error import AwaitableError
from shardrec.pending.once import Once, State

if TYPE_CHECKING:
    from shardrec.pending.lazy import LazyAwaitable

__all__ = ["Awaitable", "NoWait"]

W = TypeVar("W")
V = TypeVar("V")

_LONGEST_REPR = 60  # characters of the value


class Awaitable(abc.ABC, Generic[W]):
    """A value of type ``W`` that is on its way, such as the output of a collective that has been started.

    Subclasses implement ``_wait_impl()``, which blocks and returns the value. It runs exactly once, however often and
    from however many threads the value is asked for; what it returned (``None`` too) or raised is kept.

    Pickling, copying and deep-copying a finished awaitable give one that is finished, too; a pending one refuses, since
    what it waits for lives in this process.

    The interface is TorchRec's ``torchrec.distributed.types.Awaitable``. There, every ``wait()`` runs ``_wait_impl()``.
    """

    _once: Once[W]

    _chain: ClassVar[Callable[..., Any]]
    """What ``then`` returns; of lazy.py, which is built on this class, and sets it."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        # Made here and not in __init__, so that a subclass can set its attributes before or after super().__init__().
        self = super().__new__(cls)
        self._once = Once()
        return self

    def __init__(self) -> None:
        super().__init__()

    @abc.abstractmethod
    def _wait_impl(self) -> W:
        """Blocks until the value is there and returns it; called once."""

    def _is_ready(self) -> bool:
        """Override to tell, without blocking, that ``_wait_impl()`` would not block any more."""
        return False

    def wait(self) -> W:
        """The value. Blocks the first time; other threads that ask meanwhile block, too, and get the same object.

        Raises:
            AwaitableError: when called from this awaitable's own ``_wait_impl()`` or callbacks.
            BaseException: what ``_wait_impl()`` or a callback raised: the same object, at every call.
        """
        return self._once.settle(type(self).__name__, self._wait_recorded)

    def done(self) -> bool:
        """True once ``wait()`` returns, or raises, without blocking. Never blocks itself."""
        return self._once.state is not State.PENDING or (not self._once.running_here and self._is_ready())

    @property
    def callbacks(self) -> Callbacks[W]:
        """The callbacks that have not been called yet: a list to which TorchRec code appends. Empty after the wait."""
        return self._once.callbacks

    def add_callback(self, callback: Callable[[W], W]) -> Self:
        """Has ``callback`` map the value to what everybody gets in its place.

        Callbacks run once, in order, at the end of the wait, each on what the one before returned. One that is added
        when the value is there already is applied to it at once; who has asked before keeps what they got. One that is
        added after a failure is never called: the kept error is raised as before. While another thread waits, this
        blocks until that has ended.

        Args:
            callback: from value to value; what it raises is kept as the error of the wait, unless it was applied at
                once, in which case the caller gets it and the value stays as it was.

        Returns:
            This awaitable.
        """
        self._once.apply(callback)
        return self

    def then(self, function: Callable[[W], V]) -> LazyAwaitable[V]:
        """An awaitable of ``function(value)``, which waits for this one, and calls ``function``, at its first use.

        Args:
            function: called once, on this awaitable's value; what it raises is the new one's error.
        """
        chained: LazyAwaitable[V] = self._chain(function, self)
        return chained

    def __repr__(self) -> str:
        """Tells the state without waiting."""
        name, once = type(self).__name__, self._once
        if once.state is State.PENDING:
            return f"<{name} {State.PENDING.value}>"
        text = " ".join(repr(once.error if once.state is State.FAILED else self.wait()).split())
        short = text if len(text) <= _LONGEST_REPR else f"{text[: _LONGEST_REPR - 1]}…"
        return f"<{name} {once.state.value}: {short}>"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        return self._finished_type(), (self._finished_value("pickled"),)

    def __copy__(self) -> Awaitable[W]:
        return self._finished_type()(copy.copy(self._finished_value("copied")))

    def __deepcopy__(self, memo: dict[int, Any]) -> Awaitable[W]:
        return self._finished_type()(copy.deepcopy(self._finished_value("copied"), memo))

    def _wait_recorded(self) -> W:
        # The label is TorchRec's, so that scripts that read its traces find these waits, too.
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
    """A value that is there already, where an awaitable is asked for.

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
