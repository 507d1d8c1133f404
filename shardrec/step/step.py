"""Sharded modules called one after the other share an exchange.

::

    emb_a = model.a(features_a)     queued
    emb_b = model.b(features_b)     queued; both of the model's modules are here: one header, one payload, lookups,
                                    one output all-to-all issued
    x = model.dense(dense)          while it is under way
    emb_a["f"]                      waits

An exchange begins as soon as all the calls are queued that came before the first use in the model's last forward of the
same mode, with gradients or without (in its first: as many as it has sharded modules. See
:mod:`shardrec.step.call_batching`), or else at the first use of a queued call's value. So a model that makes the
same calls in each step makes the fewest exchanges.

Outside a model's forward (a sharded module used alone, a recomputation in backward) each call exchanges at once; so
does each call of one rank, which has nothing to share.

[Note: who reads a flag]
On a device, one rank need not wait until a batch is checked (:mod:`shardrec.exchange.fault_flags`). A model's forward
in training goes on, and the flags of its batches are read later:

- by a backward that reaches the model's output, and again where it reaches a lookup, if no tensor was seen in it;
- by the model's next forward, by what reads or writes its tables (``state_dict``, a save), and at the end of a
  ``TrainPipeline``.

A call reads its flag itself, before the lookup, where its backward would not do so in time: without gradients, by an
operator, outside of a model's forward, and where a backward may update dense layers before it reaches the lookup
(:attr:`shardrec.ShardedModel.updates_above_lookups`); where ids would get rows (dynamic ids); and where the lookup
takes each id to be in a bag (bfloat16).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import accumulate
from threading import RLock
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor

from shardrec.errors import ConfigError, InputError, ShardrecError
from shardrec.exchange.fault_flags import FaultFlag
from shardrec.exchange.headers import Headers, is_shared
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.exchange.recomputation import is_recomputing, recomputes_graph
from shardrec.exchange.row_exchange import RowAllToAll
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.step.call_batching import CallBatching, Phase
from shardrec.step.calls_ahead import Ahead
from shardrec.step.exchange import RowExchange, finish, launch
from shardrec.step.id_exchange import can_share, exchange_ids, split_by_compatibility
from shardrec.step.one_rank import look_up_here
from shardrec.step.records import GradMode, InFlight


class Step:
    """The calls of a model's sharded modules, from their begin to their value.

    Args:
        headers: of the model.
        comms: formats of the exchange of rows.
        life_cycle: of the model.

    Attributes:
        rows: the exchange of rows.
        lock: held in a forward and in a call. Exchanges are matched by their order, and threads would interleave
            differently on each rank.
        ahead: the calls of the present forward, if they were made before it.
        observed: if a list, each call of the present forward is appended, with its module, features and modes.
        unused: references to the calls with values that have not been used yet, as long as they are not freed.
        reads_flags_late: on a device, whether backwards read whether the batches of this forward are faulty; else each
            call does.
    """

    def __init__(self, headers: Headers, comms: QuantizedComms, life_cycle: LifeCycle) -> None:
        collectives, device = headers.collectives, headers.device
        self._comms = comms
        inside = RowAllToAll(collectives, QuantizedComms(), "partial sums", device)
        rows = RowAllToAll(collectives, comms, device=device)
        self.rows = RowExchange(inside, rows, life_cycle, headers.flags)
        self.lock = RLock()
        self.ahead: Ahead | None = None
        self.observed: list[tuple[object, object, GradMode]] | None = None
        self.unused: set[ref[InFlight]] = set()
        self.reads_flags_late = False
        self._headers, self._collectives, self._life_cycle = headers, collectives, life_cycle
        self._is_alone = collectives.world_size == 1
        self._calls: list[InFlight] = []
        self._batching = CallBatching()

    def enter(self, *, waits: bool = False) -> None:
        """Take the lock.

        Args:
            waits: wait for the other thread if there is one rank, as the forks of a TorchScript program do.

        Raises:
            ConfigError: if another thread is in the model's forward, or calls one of its modules.
        """
        if not self.lock.acquire(blocking=waits and self._is_alone):
            self._refuse_threads()

    def _refuse_threads(self) -> NoReturn:
        raise ConfigError(
            f"rank {self._collectives.rank}: two threads call sharded modules of one model concurrently, and "
            "the ranks' exchanges would not match. Call them from one thread: an exchange is under way when the "
            "call returns, and is waited for at the first use of its value"
        )

    def join(self, call: InFlight, module: object, *, scripted: bool = False) -> None:
        """Begin the exchange of a call, if no further call is expected to share it.

        Args:
            call: begun, or made ahead.
            module: that is called.
            scripted: whether TorchScript calls it. Python does not see where its forward begins and ends.

        Raises:
            InputError: on every rank, if a batch of any is faulty.
            PeerError: if another rank is gone.
        """
        call.on_value = (*self._life_cycle.value_made,)
        self.unused.add(ref(call, self.unused.discard))
        if self._is_alone:
            if not call.is_launched:
                self._look_up_here(call)
            return
        for queued in self._calls:
            if queued.user is not None and queued.user() is None:
                self._tell_of_program()
                break
        if self._calls and not can_share(self._headers, call, self._calls):
            self.flush()
        if not call.is_launched:
            self._calls.append(call)
        if self._batching.call(id(module), self._headers.modules, by_program=scripted):
            self.flush()
        elif call.is_queued and not call.fault:
            call.own_input()

    def _look_up_here(self, call: InFlight) -> None:
        """Look up a call of one rank, in the mode in which it was made, which is the present one."""
        try:
            for begin in self._life_cycle.look_up_begins:
                begin()
            if call.received is None:
                exchange_ids(self._headers, [call])
            if call.flag is not None:
                self._read_flag(call, call.flag)
            if call.by_operator:
                launch(self.rows, [call])
            else:
                look_up_here(self.rows, call)
            if call.bad_ids is not None:
                _count_bad_ids(call, call.bad_ids)
        except BaseException as error:
            call.error = error
            raise

    def _read_flag(self, call: InFlight, flag: FaultFlag) -> None:
        """Raise if the batch is faulty, now or in the call's backward."""
        is_updated, plan = call.requires_grad and torch.is_grad_enabled() and not call.by_operator, call.step
        if self.reads_flags_late and is_updated and plan.id_maps is None and plan.lookup.reads_by_offsets:
            self._headers.flags.unread.append(flag)
        else:
            flag.check()

    def value(self, call: InFlight) -> Any:
        """The value of a call, whose exchange begins if it has not. It can be taken once.

        Raises:
            ShardrecError: what made the exchange fail.
        """
        if self._is_alone and call.error is None:
            self.unused.discard(ref(call))
        else:
            self.use(call)
        return finish(call)

    def use(self, call: InFlight) -> None:
        """A call's value is used: its exchange must begin.

        Raises:
            ShardrecError: what made the exchange fail.
        """
        self.unused.discard(ref(call))
        if not self._is_alone:
            if call.error is None and not call.is_launched:
                self.flush()
            self._batching.use()
        if call.error is not None:
            raise call.error

    def begin_forward(self) -> bool:
        """A model's forward begins. Calls made in it may share exchanges. Whether it is not inside of another.

        Raises:
            ConfigError: if another thread is in it, or calls one of its sharded modules.
        """
        if not self.lock.acquire(blocking=False):
            self._refuse_threads()
        if self._is_alone:
            return True
        if self._batching.phase is Phase.FORWARD:
            return False
        is_again = torch._C._current_graph_task_id() >= 0 and recomputes_graph()
        self._batching.begin(torch.is_grad_enabled(), is_again=is_again)  # a mode that ranks compare in headers
        return True

    def end_forward(self, error: BaseException | None) -> None:
        """A forward that :meth:`begin_forward` began ends, by an error if there is one.

        Raises:
            ShardrecError: of an exchange that waited for more calls.
        """
        try:
            if self._is_alone:
                return
            if error is None:
                try:
                    if self._calls:
                        self.flush()
                    self._batching.end(ahead=self.ahead is not None)
                except BaseException as late:
                    self._fail(late)
                    raise
            else:
                self._fail(error)
        finally:
            self.lock.release()

    def _fail(self, error: BaseException) -> None:
        if self.ahead or self._calls or self._batching.lacks_calls or is_shared(error):
            self._batching.fail()
        else:
            self._batching.end()
        calls, self._calls = self._calls, []
        for call in calls:
            call.error = ShardrecError(f"the model's forward failed before this lookup was exchanged: {error}")

    @contextmanager
    def forward(self) -> Iterator[None]:
        """:meth:`begin_forward` and :meth:`end_forward` around what runs inside."""
        is_outermost = self.begin_forward()
        try:
            yield
        except BaseException as error:
            self.leave_forward(error, is_outermost=is_outermost)
            raise
        self.leave_forward(None, is_outermost=is_outermost)

    def leave_forward(self, error: BaseException | None, *, is_outermost: bool) -> None:
        """:meth:`end_forward` of a forward that :meth:`begin_forward` has begun."""
        if is_outermost:
            self.end_forward(error)
        else:
            self.lock.release()

    @property
    def others_wait(self) -> bool:
        """After a forward that raised: whether the other ranks still make an exchange in it, or raise with this one."""
        return self._batching.phase is Phase.FAILED

    def launch_ahead(self) -> None:
        """Exchange rows for the calls that this forward makes before its first use, if their ids were exchanged ahead.

        So their rows travel while the model computes the layers before its sharded modules.
        """
        if self.ahead is not None and self._batching.known and not self._is_alone:
            calls = self.ahead.calls[: self._batching.known[0]]
            shared = split_by_compatibility(self._headers, calls) == [calls]
            if shared and all(call.is_queued and call.is_sent for call in calls):
                self._calls = list(calls)
                self.flush()

    def flush(self) -> None:
        """Make the exchange of all queued calls."""
        calls, self._calls = self._calls, []
        if not calls:
            return
        mode = calls[0].mode
        try:
            for begin in self._life_cycle.look_up_begins:
                begin()
            if mode.is_current:
                self._exchange(calls)
            else:
                with mode.entered():
                    self._exchange(calls)
        except BaseException as error:
            self._batching.drop_run()
            for call in calls:
                call.error = error
            raise

    def _tell_of_program(self) -> None:
        """A program has failed here before its calls were exchanged: tell the other ranks, which wait for them."""
        self._calls = []
        self._batching.drop_run()
        with suppress(InputError):  # this rank has raised its own error
            self._headers.fail_all("a scripted program failed between two lookups, by an error of this rank's own")

    def _exchange(self, calls: list[InFlight]) -> None:
        """header and ids → look up → rows, for calls that share an exchange."""
        unsent = []
        for call in calls:
            if call.received is None and call.receive is None:
                unsent.append(call)
        if unsent:
            exchange_ids(self._headers, unsent)
        launch(self.rows, calls)
        for call in calls:
            if call.bad_ids is not None:
                _count_bad_ids(call, call.bad_ids)

    def replan(self) -> None:
        """The modules have another plan: forwards of before have no backward any more, nor do calls made ahead hold."""
        before = self.rows.output
        self.rows.output = RowAllToAll(self._collectives, self._comms, device=before.device)
        before.ended = (
            "this backward belongs to a forward before model.reshard(), whose lookups are gone: make the backward and "
            "the optimizers' steps first, and reshard between a step and the next forward"
        )
        self._headers.plans += 1

    def forget_call_batching(self) -> None:
        """Forget how the last forward went, because another rank's forward has failed and is forgotten as well."""
        self._batching.forget()

    def serve(self, ahead: Ahead) -> None:
        """After a forward that failed here: look up and send the rows that the other ranks wait for in their
        forward."""
        begin = sum(call.is_launched for call in ahead.calls)
        for end in accumulate(self._batching.known or [len(ahead.calls)]):
            if end > begin:
                for calls in split_by_compatibility(self._headers, ahead.calls[begin:end]):
                    self._calls = calls
                    for call in calls:
                        call.error = None
                    self.flush()
                begin = end


def _count_bad_ids(call: InFlight, bad_ids: Tensor) -> None:
    """Of a batch that is looked up. Ids that were only exchanged ahead may be dropped, and exchanged again."""
    if not is_recomputing():
        call.input.bad_ids += bad_ids
