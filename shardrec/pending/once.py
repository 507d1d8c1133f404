"""The outcome of a wait: computed by one thread, kept for all threads.

::

              resolve(compute)                   resolve() again, from any thread
    PENDING ──────────────────► DONE   (value)   ► the same value
            └─────────────────► FAILED (error)   ► the same error, with the traceback it had
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from enum import Enum
from types import TracebackType
from typing import Generic, NoReturn, SupportsIndex, TypeVar, cast

from shardrec.errors import AwaitableError

W = TypeVar("W")


class Callbacks(list[Callable[[W], W]]):
    """A list of callbacks that refuses additions after the callbacks have been called.

    Attributes:
        closed: whether the callbacks have been called.

    Raises:
        AwaitableError: if a callback is added to a closed list. It would never be called.
    """

    closed = False

    def append(self, callback: Callable[[W], W], /) -> None:
        self._check_open()
        super().append(callback)

    def extend(self, callbacks: Iterable[Callable[[W], W]], /) -> None:
        self._check_open()
        super().extend(callbacks)

    def insert(self, index: SupportsIndex, callback: Callable[[W], W], /) -> None:
        self._check_open()
        super().insert(index, callback)

    def _check_open(self) -> None:
        if self.closed:
            raise AwaitableError(
                "a callback was put into .callbacks after the value had been waited for, so it would never be called:"
                " use add_callback(), which applies it immediately, or .then()"
            )


class State(Enum):
    """State of a value that is computed once."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


class Once(Generic[W]):
    """Runs a computation exactly once, on the first thread that needs it, and keeps its value or its error.

    Any value is kept, also ``None``, and an error is kept as well: a collective cannot be waited for a second time.
    Other threads block while the computation runs. If the computation asks for its own outcome, it gets an error, not a
    deadlock.

    Attributes:
        state: pending until the outcome is kept.
        error: the kept error, if it failed.
        callbacks: called on the value, in order, before it is kept. Each gets the result of the previous callback.
    """

    __slots__ = ("_lock", "_owner", "_traceback", "_value", "callbacks", "error", "state")

    def __init__(self) -> None:
        self.state = State.PENDING
        self.error: BaseException | None = None
        self.callbacks: Callbacks[W] = Callbacks()
        self._value: W | None = None
        self._traceback: TracebackType | None = None
        self._lock = threading.Lock()
        self._owner: int | None = None

    @property
    def running_here(self) -> bool:
        """True while this thread, and no other, runs the computation or a callback."""
        return self._owner == threading.get_ident()

    def resolve(self, name: str, compute: Callable[[], W]) -> W:
        """The outcome. Runs ``compute`` and then the callbacks if they have not run.

        Args:
            name: name of the pending value, for messages.
            compute: returns the value. Called at most once in the life of this object.

        Raises:
            AwaitableError: if ``compute`` or a callback, in this thread, asks for its own outcome.
            BaseException: the error that ``compute`` or a callback raised, the same object every time.
        """
        if self.state is State.PENDING:
            if self._owner == threading.get_ident():
                raise AwaitableError(
                    f"{name} was asked for its own value by the _wait_impl() or the callback that computes it: use only"
                    " what these are given, or chain with .then()"
                )
            with self._lock:
                # Another thread may have resolved it between the first check and the lock.
                if self.state is State.PENDING:
                    self._run(name, compute)
        if self.state is State.FAILED:
            self._raise()
        return self._value  # type: ignore[return-value]

    def apply(self, callback: Callable[[W], W]) -> None:
        """Calls ``callback`` on the value: in turn while pending, immediately on the kept value, never after an error.

        Raises:
            AwaitableError: from inside a callback that is itself being applied to the kept value.
        """
        if self.running_here:
            # Called from a callback: _run continues until the list is empty.
            self.callbacks.append(callback)
            return
        with self._lock:
            if self.state is State.PENDING:
                self.callbacks.append(callback)
            elif self.state is State.DONE:
                self._owner = threading.get_ident()
                try:
                    self._value = callback(cast(W, self._value))
                finally:
                    self._owner = None

    def _run(self, name: str, compute: Callable[[], W]) -> None:
        self._owner = threading.get_ident()
        try:
            value = compute()
            while self.callbacks:
                value = self.callbacks.pop(0)(value)
        except Exception as error:
            self._fail(error)
        except BaseException as error:
            # Ctrl-C ends this wait. A later use must not look like a second Ctrl-C.
            self._fail(AwaitableError(f"the wait for {name} was cut off by {type(error).__name__}. Its value is lost"))
            raise
        else:
            self._value = value
            self.state = State.DONE
        finally:
            self._owner = None
            self.callbacks.clear()
            self.callbacks.closed = True

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self._traceback = error.__traceback__
        self.state = State.FAILED

    def _raise(self) -> NoReturn:
        # Each raise adds frames to the error's traceback, so each starts from the kept one.
        raise cast(BaseException, self.error).with_traceback(self._traceback)
