"""Sharded modules called one after the other share an exchange.

::

    emb_a = model.a(features_a)     queued
    emb_b = model.b(features_b)     queued; both of the model's modules are here: one header, one payload, lookups,
                                    one output all-to-all issued
    x = model.dense(dense)          while it is under way
    emb_a["f"]                      waits

An exchange begins as soon as all the calls are queued that came before the first use in the model's last forward (in
its first forward: as many as it has sharded modules), or else at the first use of a queued call's value. So a model
that makes the same calls in each step makes the fewest exchanges without any configuration, and other models still get
correct values. All ranks run the same model and make the same decisions; the headers' checksum detects differences.

Outside a model's forward (a sharded module used alone, a recomputation in backward) each call exchanges at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import accumulate
from threading import RLock

import torch

from shardrec.errors import ConfigError, ShardrecError
from shardrec.exchange.ahead import Ahead
from shardrec.exchange.blocks import BlockExchange
from shardrec.exchange.context import StepContext
from shardrec.exchange.step import Call, Caller, can_share, run_step, sharing_runs
from shardrec.exchange.wire import QuantizedComms

__all__ = ["ExchangeQueue", "ModelContext"]


class ModelContext(StepContext):
    """A model's :class:`StepContext`, with the queue of its calls.

    Attributes:
        made_ahead: the calls of this forward, if they were made before it.
    """

    made_ahead: Ahead | None = None

    @cached_property
    def queue(self) -> ExchangeQueue:
        """The queue of the calls of its sharded modules."""
        return ExchangeQueue(self)


class ExchangeQueue:
    """The calls of a model's sharded modules that wait for their exchange.

    Args:
        context: of the model.
    """

    def __init__(self, context: ModelContext) -> None:
        self.context = context
        self.observed: list[tuple[Caller, object]] | None = None
        self._output = BlockExchange(
            context.collectives, context.comms, device=context.device, before_gradients=context.before_gradients
        )
        self._inside = BlockExchange(context.collectives, QuantizedComms(), "partial sums", context.device)
        self._calls: list[Call] = []
        self._in_forward = False
        self._habit: list[int] = []  # calls before each first use, as the last forward made them
        self._seen: list[int] = []  # the same of this forward
        self._run = 0  # calls since the last first use
        self._first = 0  # the id of the module that made the first of them
        self._runs: dict[int, int] = {}  # calls of the last run that began with this module
        self._one_thread = RLock()
        self._last_habit: list[int] = []  # the habit when the last forward began

    def submit(self, module: Caller, features: object, *, by_operator: bool = False, scripted: bool = False) -> Call:
        """Queue a module's call, and begin the exchange if no further call is expected to share it.

        A call that was made ahead of this forward (:mod:`shardrec.exchange.ahead`) with these features is used instead
        of a new one.

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
                self.observed.append((module, features))
            ahead = self.context.made_ahead
            queued = None if ahead is None else ahead.take(module, features)
            if queued is None:
                queued = module.new_call(features)
            elif fault := module.fault():  # since the call was made ahead
                raise ConfigError(fault)
            queued.by_operator = by_operator
            if self._calls and not can_share(self.context, queued, self._calls):
                self.flush()
            if not queued.is_launched:
                self._calls.append(queued)
            if not self._run:
                self._first = id(module)
            self._run += 1
            if self._run >= self._awaited(scripted):
                self.flush()
        return queued

    def used(self, queued: Call) -> None:
        """Begin the exchange of a call whose value is used."""
        single = self.context.collectives.world_size == 1
        with self._alone(waits=True) if single and queued.by_operator else nullcontext():
            if queued.is_queued:
                self.flush()
            self._end_run()

    @contextmanager
    def _alone(self, *, waits: bool = False) -> Iterator[None]:
        """Exclude other threads: exchanges are matched by their order, and threads would interleave differently on each
        rank.

        Args:
            waits: wait for the other thread if there is one rank, as the forks of a TorchScript program do.
        """
        if not self._one_thread.acquire(blocking=waits and self.context.collectives.world_size == 1):
            raise ConfigError(
                f"rank {self.context.collectives.rank}: two threads call sharded modules of one model at once, and "
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
            if self._in_forward:
                yield
                return
            self._in_forward, self._seen, self._run = True, [], 0
            self._last_habit = self._habit
            try:
                yield
                self.flush()
                self._end_run()
                self._habit = self._seen
            except BaseException as error:
                # Ranks that failed at different places must not go on with different habits.
                self._habit = []
                calls, self._calls = self._calls, []
                for call in calls:
                    call.error = ShardrecError(f"the model's forward failed before this lookup was exchanged: {error}")
                raise
            finally:
                self._in_forward = False

    def launch_ahead(self) -> None:
        """Exchange rows for the calls that this forward makes before its first use, if their ids were exchanged ahead.

        So their rows travel while the model computes the layers before its sharded modules.
        """
        ahead = self.context.made_ahead
        if ahead is not None and self._habit:
            calls = ahead.calls[: self._habit[0]]
            shared = sharing_runs(self.context, calls) == [calls]
            if shared and all(call.is_queued and call.sent is not None for call in calls):
                self._calls = list(calls)
                self.flush()

    def flush(self) -> None:
        """Make the exchange of all queued calls."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        try:
            with calls[0].mode():
                run_step(self.context, self._inside, self._output, calls)
        except BaseException as error:
            for call in calls:
                call.error = error
            raise

    def forget_habit(self) -> None:
        """Forget the calls of the last forward, because another rank's forward has failed and forgets them as well."""
        self._habit = []

    def serve(self, ahead: Ahead) -> None:
        """After a forward that failed here: look up and send the rows for which the other ranks' forwards wait."""
        left = [one for one in ahead.calls if not one.is_launched]
        habit = self._last_habit or [len(ahead.calls)]
        begin = len(ahead.calls) - len(left)
        for end in accumulate(habit):
            if end > begin:
                self._calls = ahead.calls[begin:end]
                for call in self._calls:
                    call.error = None
                self.flush()
                begin = end

    def _awaited(self, scripted: bool) -> int:
        """The expected number of calls of this run before its first use."""
        if not self._in_forward:
            return self._runs.get(self._first, self.context.modules) if scripted else 1
        done = len(self._seen)
        return self._habit[done] if done < len(self._habit) else self.context.modules

    def _end_run(self) -> None:
        if self._run:
            self._seen.append(self._run)
            self._runs[self._first] = self._run
            self._run = 0
