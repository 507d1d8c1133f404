"""Sharded modules called one after the other share an exchange.

::

    emb_a = model.a(features_a)     queued
    emb_b = model.b(features_b)     queued; both of the model's modules are here: one header, one payload, lookups,
                                    one output all-to-all issued
    x = model.dense(dense)          while it is under way
    emb_a["f"]                      waits

An exchange begins as soon as all the calls are queued that came before the first use in the model's last forward of the
same mode, with gradients or without (in its first: as many as it has sharded modules; see
:mod:`shardrec.exchange.call_batching`), or else at the first use of a queued call's value. So a model that makes the
same calls in each step makes the fewest exchanges.

Outside a model's forward (a sharded module used alone, a recomputation in backward) each call exchanges at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch

from shardrec.errors import ConfigError, ShardrecError
from shardrec.exchange.call import Call, Caller, GradMode, can_share, exchange_and_look_up, split_by_compatibility
from shardrec.exchange.call_batching import CallBatching, Phase
from shardrec.exchange.calls_ahead import Ahead
from shardrec.exchange.headers import Headers
from shardrec.exchange.row_exchange import RowAllToAll
from shardrec.exchange.wire_format import QuantizedComms

__all__ = ["ExchangeQueue"]


class ExchangeQueue:
    """The calls of a model's sharded modules that wait for their exchange.

    Args:
        headers: of the model.
        comms: formats of the exchange of rows.
        before_gradients: called in each backward before gradients are sent, on every rank.

    Attributes:
        output: the exchange of rows.
        ahead: the calls of the present forward, if they were made before it.
        observed: if a list, each call of the present forward is appended, with its features and modes; default: None.
        on_value: called with each call and its value.
        before_look_up: called when the exchange of some calls begins, whoever made them.
        unused: the calls whose value has not been used yet.
    """

    def __init__(self, headers: Headers, comms: QuantizedComms, before_gradients: Callable[[], None]) -> None:
        collectives, device = headers.collectives, headers.device
        self.output = RowAllToAll(collectives, comms, device=device, before_gradients=before_gradients)
        self._comms = comms
        self.ahead: Ahead | None = None
        self.observed: list[tuple[Caller, object, GradMode]] | None = None
        self.on_value: Callable[[Call, Any], None] | None = None
        self.before_look_up: Callable[[], None] | None = None
        self._headers, self._collectives = headers, collectives
        self._inside = RowAllToAll(collectives, QuantizedComms(), "partial sums", device)
        self._calls: list[Call] = []
        self.unused: WeakSet[Call] = WeakSet()
        self._batching = CallBatching()
        self._one_thread = RLock()

    def submit(self, module: Caller, features: object, *, by_operator: bool = False, scripted: bool = False) -> Call:
        """Queue a module's call, and begin the exchange if no further call is expected to share it.

        A call that was made ahead of this forward (:mod:`shardrec.exchange.calls_ahead`) with these features, in these
        modes, is used instead of a new one.

        Args:
            module: the sharded module that is called.
            features: its input.
            by_operator: whether an operator calls it (:mod:`shardrec.exchange.operators`), whose backward differs.
            scripted: whether the operator is called by TorchScript, whose forward has no beginning and end visible to
                Python.

        Raises:
            InputError: on every rank, if a batch of any is faulty.
            PeerError: if another rank is gone.
            ConfigError: inside ``torch.jit.trace``; if another thread is in the model's forward, or calls another of
                its modules; if the module's tables were changed since the call was made ahead.
        """
        if torch._C._is_tracing():  # type: ignore[no-untyped-call,unused-ignore]
            raise ConfigError(
                "torch.jit.trace records the sizes of one batch, and no collective: script the model with "
                "shardrec.script(model), or export it with shardrec.export"
            )
        with self._alone(waits=scripted):
            if self.observed is not None:
                self.observed.append((module, features, GradMode.current()))
            queued = None if self.ahead is None else self.ahead.take(module, features)
            if queued is None:
                queued = module.new_call(features)
            elif fault := module.fault():  # since the call was made ahead
                raise ConfigError(fault)
            queued.by_operator, queued.on_value = by_operator, self.on_value
            self.unused.add(queued)
            if self._calls and not can_share(self._headers, queued, self._calls):
                self.flush()
            if not queued.is_launched:
                self._calls.append(queued)
            if self._batching.call(id(module), self._headers.modules, by_program=scripted):
                self.flush()
        return queued

    def used(self, queued: Call) -> None:
        """A call's value is used: its exchange must begin."""
        self.unused.discard(queued)
        single = self._collectives.world_size == 1
        with self._alone(waits=True) if single and queued.by_operator else nullcontext():
            if queued.is_queued:
                self.flush()
            self._batching.use()

    @contextmanager
    def _alone(self, *, waits: bool = False) -> Iterator[None]:
        """Exclude other threads: exchanges are matched by their order, and threads would interleave differently on each
        rank.

        Args:
            waits: wait for the other thread if there is one rank, as the forks of a TorchScript program do.
        """
        if not self._one_thread.acquire(blocking=waits and self._collectives.world_size == 1):
            raise ConfigError(
                f"rank {self._collectives.rank}: two threads call sharded modules of one model at once, and "
                "the ranks' exchanges would not match; call them from one thread: an exchange is under way when the "
                "call returns, and is waited for at the first use of its value"
            )
        try:
            yield
        finally:
            self._one_thread.release()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Run a model's forward; calls made inside may share exchanges.

        Raises:
            ConfigError: if another thread is in it, or calls one of its sharded modules.
        """
        with self._alone():
            if self._batching.phase is Phase.FORWARD:
                yield
                return
            self._batching.begin(torch.is_grad_enabled())  # which ranks compare in headers
            try:
                yield
                self.flush()
                self._batching.end(ahead=self.ahead is not None)
            except BaseException as error:
                if self.ahead or self._calls or self._batching.lacks_calls or isinstance(error, ShardrecError):
                    self._batching.fail()
                else:
                    self._batching.end()
                calls, self._calls = self._calls, []
                for call in calls:
                    call.error = ShardrecError(f"the model's forward failed before this lookup was exchanged: {error}")
                raise

    @property
    def others_wait(self) -> bool:
        """After a forward that raised: whether the other ranks still make an exchange in it, or raise with this one."""
        return self._batching.phase is Phase.FAILED

    def launch_ahead(self) -> None:
        """Exchange rows for the calls that this forward makes before its first use, if their ids were exchanged ahead.

        So their rows travel while the model computes the layers before its sharded modules.
        """
        if self.ahead is not None and self._batching.known:
            calls = self.ahead.calls[: self._batching.known[0]]
            shared = split_by_compatibility(self._headers, calls) == [calls]
            if shared and all(call.is_queued and call.sent is not None for call in calls):
                self._calls = list(calls)
                self.flush()

    def flush(self) -> None:
        """Make the exchange of all queued calls."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        try:
            if self.before_look_up is not None:
                self.before_look_up()
            with calls[0].mode():
                exchange_and_look_up(self._headers, self._inside, self.output, calls)
        except BaseException as error:
            for call in calls:
                call.error = error
            raise

    def replan(self) -> None:
        """The modules have another plan: forwards of before have no backward any more, nor do calls made ahead hold."""
        before = self.output
        self.output = RowAllToAll(
            self._collectives, self._comms, device=before.device, before_gradients=before.before_gradients
        )
        before.ended = (
            "this backward is that of a forward before model.reshard(), whose lookups are gone: make the backward and "
            "the optimizers' steps first, and reshard between a step and the next forward"
        )
        self._headers.plans += 1

    def forget_call_batching(self) -> None:
        """Forget how the last forward went, where another rank's has failed and forgets, too."""
        self._batching.forget()

    def serve(self, ahead: Ahead) -> None:
        """After a forward that failed here: look up and send what the other ranks, whose forward goes on, wait for."""
        begin = sum(call.is_launched for call in ahead.calls)
        for end in accumulate(self._batching.known or [len(ahead.calls)]):
            if end > begin:
                for calls in split_by_compatibility(self._headers, ahead.calls[begin:end]):
                    self._calls = calls
                    for call in calls:
                        call.error = None
                    self.flush()
                begin = end
