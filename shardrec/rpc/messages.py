"""How a process calls the embedding server of another one: messages of tensors and plain data, checked on arrival.

::

    call      (method, arguments)           of the server; its Future is the answer, so that no RPC thread waits
    part      (collection, header, words)   one collection's ids for this server, as a payload all-to-all carries
              int, [int], (n,) int32        them (:mod:`shardrec.exchange.payload`), and its row of the header exchange
    answer    (True, value) or (False, name of an error class, its text)

An error travels as text: the exception of a callee would come as a RuntimeError without its class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from shardrec import errors
from shardrec.errors import BusyError, InputError, PeerError
from shardrec.exchange.batch import Batch
from shardrec.exchange.check import ids_are_valid
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.servers import Servers

Part = tuple[int, list[int], Tensor]
Answer = tuple[bool, object] | tuple[bool, str, str]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05

_F = TypeVar("_F", bound=Callable[..., Future[Answer]])


def asynchronous(function: _F) -> _F:
    """``async_execution`` with types: RPC must be given the function that it returns."""
    marked: _F = async_execution(function)
    return marked


_answer: Callable[[str, Sequence[object]], Future[Answer]] | None = None
"""Answers calls of this process."""


def answer_calls(answer: Callable[[str, Sequence[object]], Future[Answer]]) -> None:
    """Have ``answer`` answer the calls of this process, given the method and its arguments."""
    global _answer
    _answer = answer


@asynchronous
def call(method: str, *arguments: object) -> Future[Answer]:
    """Call a method of the embedding server in the process that this is called in."""
    if _answer is None:
        return completed(failure(PeerError("there is no embedding server in this process. Is the name a trainer's?")))
    return _answer(method, arguments)


class Connections:
    """The servers of a plan, each with the replicas that stand for it, as this process calls them."""

    def __init__(self, servers: Servers) -> None:
        self.names = servers.of_ranks()
        self.timeout_s = servers.timeout_s
        self._turn = count()

    def __len__(self) -> int:
        return len(self.names)

    def call(self, server: int, method: str, *arguments: object) -> Call:
        """Call a method of a server, or of one of its replicas in turn."""
        names = self.names[server]
        first = next(self._turn) % len(names)
        return Call([*names[first:], *names[:first]], method, arguments, self.timeout_s)

    def call_replicas(self, server: int, method: str, *arguments: object) -> None:
        """Call a method of a server and all its replicas, and wait."""
        for each in [Call([name], method, arguments, self.timeout_s) for name in self.names[server]]:
            each.wait()


class Call:
    """A call in progress. If a replica is gone, another replica is asked.

    Args:
        names: RPC names of the replicas. The first is asked first.
        method: to call.
        arguments: of it.
        timeout_s: in seconds, for all attempts.
    """

    def __init__(self, names: Sequence[str], method: str, arguments: Sequence[object], timeout_s: float) -> None:
        self._names = list(names)
        self._method = method
        self._arguments = arguments
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._future = self._send()

    def _send(self) -> Future[Answer]:
        future: Future[Answer]
        try:
            message = (self._method, *self._arguments)
            future = rpc.rpc_async(self._names[0], call, args=message, timeout=max(self._left(), 0.001))
        except RuntimeError as error:  # the agent is not there, or knows no such name
            future = Future()
            future.set_exception(error)  # type: ignore[arg-type] # torch says that it takes a value
        return future

    def _left(self) -> float:
        return self._end - time.monotonic()

    def wait(self) -> Any:
        """Wait for the answer. While the server is busy, ask it again.

        Raises:
            ShardrecError: what the server answered.
            PeerError: if no replica has answered in time.
        """
        pause = _FIRST_PAUSE_S
        while True:
            name = self._names[0]
            try:
                answer = self._future.wait()
            except Exception as error:  # torch raises the class of the callee's error, if it knows it
                if len(self._names) > 1:
                    self._names.pop(0)
                    self._future = self._send()
                    continue
                first = str(error).split("\n", 1)[0][:200]
                raise PeerError(
                    f"server {name!r} is gone or did not answer the {self._method} within {self._timeout_s:g} s "
                    f"({first}). Start it again from the last checkpoint, and connect again",
                    waited_for=self._method,
                ) from error
            try:
                return unwrapped(answer, name)
            except BusyError:
                if self._left() <= pause:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                self._future = self._send()


def complete(future: Future[Answer], answer: Answer) -> None:
    """Complete a Future. Its callbacks send it to a caller that may be gone."""
    with suppress(RuntimeError):
        future.set_result(answer)


def completed(answer: Answer) -> Future[Answer]:
    """A Future that has the answer already."""
    future: Future[Answer] = Future()
    future.set_result(answer)
    return future


def failure(error: BaseException) -> Answer:
    """An error as an answer: by the class of it that callers know."""
    for cls in type(error).__mro__:
        if cls.__name__ in errors.__all__ and issubclass(cls, errors.ShardrecError):
            return False, cls.__name__, str(error)
    return False, "PeerError", f"the server failed: {type(error).__name__}: {error}"


def unwrapped(answer: object, server: str) -> Any:
    """The value of an answer.

    Raises:
        ShardrecError: what the server answered.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] is True:
        return answer[1]
    if isinstance(answer, tuple) and len(answer) == 3 and all(isinstance(field, str) for field in answer[1:]):
        cls = getattr(errors, answer[1]) if answer[1] in errors.__all__ else PeerError
        raise cls(f"{server}: {answer[2]}")
    raise PeerError(f"{server} answered with a {type(answer).__name__}. Use one release of shardrec everywhere")


def check_parts(parts: object, collections: Sequence[ShardedCollection]) -> list[Part]:
    """The parts of a request, if a lookup can take them.

    Raises:
        InputError: naming what is wrong.
    """
    if not isinstance(parts, list):
        raise InputError(f"a request is a list of parts, not a {type(parts).__name__}; {_SAME}")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 3):
            raise InputError(f"a part is (collection, header, words), not a {type(part).__name__}; {_SAME}")
        number, header, words = part
        if type(number) is not int or not 0 <= number < len(collections):
            raise InputError(f"collection {number!r} is asked for and this server has {len(collections)}; {_SAME}")
        _check_part(header, words, collections[number])
    return parts


_SAME = "give servers and trainers the same model, plan and release of shardrec"


def _check_part(header: object, words: object, collection: ShardedCollection) -> None:
    names = ", ".join(map(repr, list(collection.tables())[:5]))
    what = f"the request for tables {names}"
    columns = collection.input.columns
    if not (isinstance(header, list) and len(header) == columns and all(type(n) is int and n >= 0 for n in header)):
        raise InputError(f"{what} has the header {header!r}, not {columns} counts; {_SAME}")
    if not (isinstance(words, Tensor) and words.dtype is torch.int32 and words.dim() == 1):
        raise InputError(f"{what} does not come as a flat int32 tensor; {_SAME}")
    ids = collection.input.payload.lengths_and_ids(words, header)
    if ids is None:
        raise InputError(f"{what} has {words.numel()} words, which do not fit its header {header}; {_SAME}")
    lengths_SB, values = ids
    batch = Batch(keys=(), lengths=lengths_SB, values=values, weights=None)
    if not bool(ids_are_valid(batch, collection.input.shard_rows, unlimited=False)):
        raise InputError(f"{what} has ids outside of their shards, or lengths that do not add up; {_SAME}")


def check_gradient(gradient: object) -> Tensor:
    """The gradients of a request's rows.

    Raises:
        InputError: if it is anything but a flat float32 tensor.
    """
    if isinstance(gradient, Tensor) and gradient.dtype is torch.float32 and gradient.dim() == 1:
        return gradient
    raise InputError(f"a gradient is a flat float32 tensor, and a {type(gradient).__name__} came; {_SAME}")
