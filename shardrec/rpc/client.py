"""The client side of the servers, for trainers and serving clients: calls with a time limit, and their answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch.distributed import rpc

from shardrec.errors import BusyError, PeerError
from shardrec.modules.servers import Servers
from shardrec.pending import Awaitable
from shardrec.rpc.messages import unwrapped
from shardrec.rpc.server import call

__all__ = ["Answers", "Connections"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


class Connections:
    """The servers of a plan, each with the replicas that stand for it, as this process calls them."""

    def __init__(self, servers: Servers) -> None:
        self.names = servers.of_ranks()
        self.timeout_s = servers.timeout_s
        self._turn = count()

    def __len__(self) -> int:
        return len(self.names)

    def ask(self, server: int, function: Callable[..., Any], *args: Any, what: str) -> Answers:
        """Call a function on a server, on one of its replicas in turn.

        Args:
            server: its rank in the plan.
            function: of :mod:`shardrec.rpc.server`.
            args: tensors on the CPU, and plain data.
            what: the call's name in errors.
        """
        names = self.names[server]
        first = next(self._turn) % len(names)
        return Answers([*names[first:], *names[:first]], function, args, what, self.timeout_s)

    def call(self, server: int, method: str, *args: Any) -> Any:
        """Call a method of a server, or of one of its replicas, and wait."""
        return self.ask(server, call, method, *args, what=method).wait()

    def tell(self, server: int, method: str, *args: Any) -> None:
        """Call a method of a server and all its replicas, and wait."""
        for answers in [Answers([name], call, (method, *args), method, self.timeout_s) for name in self.names[server]]:
            answers.wait()


class Answers(Awaitable[Any]):
    """The answers of a call in progress; if a replica is gone, another one is asked.

    Args:
        names: RPC names of the replicas; the first is asked first.
        function: to call.
        args: of it.
        what: the call's name in errors.
        timeout_s: in seconds, for all attempts.
    """

    def __init__(
        self, names: Sequence[str], function: Callable[..., Any], args: tuple[Any, ...], what: str, timeout_s: float
    ) -> None:
        super().__init__()
        self._names = list(names)
        self._call = (function, args)
        self._what = what
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._future = self._start()

    def _start(self) -> Any:
        function, args = self._call
        try:
            return rpc.rpc_async(self._names[0], function, args=args, timeout=max(self._left(), 0.001))
        except RuntimeError as error:  # the agent is not there, or knows no such name
            return error

    def _left(self) -> float:
        return self._end - time.monotonic()

    def _is_ready(self) -> bool:
        return not isinstance(self._future, RuntimeError) and bool(self._future.done())

    def _wait_impl(self) -> Any:
        pause = _FIRST_PAUSE_S
        while True:
            name = self._names[0]
            try:
                if isinstance(self._future, RuntimeError):
                    raise self._future
                answer = self._future.wait()
            except Exception as error:  # torch raises the class of the callee's error, if it knows it
                if len(self._names) > 1:
                    self._names.pop(0)
                    self._future = self._start()
                    continue
                first = str(error).split("\n", 1)[0][:200]
                raise PeerError(
                    f"server {name!r} is gone or did not answer the {self._what} within {self._timeout_s:g} s "
                    f"({first}); start it again from the last checkpoint, and connect anew",
                    waited_for=self._what,
                ) from error
            try:
                return unwrapped(answer, name)
            except BusyError:
                if self._left() <= pause:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                self._future = self._start()
