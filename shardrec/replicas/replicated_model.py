"""A sharded model with several copies of its tables, averaged every few steps (see :mod:`shardrec.replicas.replicas`).

[Note: when a step is over]
A table may be updated in backward, by a callback after it, or by an ordinary optimizer after that. All updates are done
when the next training forward begins, so a sync that is due takes place there, and need not know how the user steps. A
step is counted at its forward, if gradients are on and it is not inside ``no_sync``: several accumulated forwards are
one step. Hence the copies differ after the last step until the next sync, which saving a checkpoint makes.

[Note: failing in every replica]
A header tells the ranks of one replica that a batch is bad. The others would continue to the dense part's all-reduce
and wait there, or match it with another step. So all ranks agree at the end of each training forward, in one small
all-to-all between the hosts' processors: on CUDA nothing waits for the device, and the device does not wait for it. No
table has been touched before a backward, so every rank can raise the same error and continue with the next batch. This
also catches failures on one rank after the last header, and ranks that are in different steps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardrec._dynamo import left_alone, passed_over
from shardrec.errors import AnomalyError, InputError, PeerError
from shardrec.exchange.backward_watch import weak_hook
from shardrec.exchange.headers import Headers, is_own, is_shared, quoted
from shardrec.exchange.subgroups import end_with
from shardrec.layout import ShardingPlan
from shardrec.modules.dense import DenseOptions, DenseWrap
from shardrec.replicas.replicas import Averager, ModelOfCopies, ReplicaGroups, Replicas
from shardrec.step.context import ModelContext


class ReplicatedModel(ModelOfCopies):
    """The result of :func:`shardrec.shard` with ``replicas``: a :class:`ShardedModel` with several copies of its
    tables.

    Inside a replica, gradients are means over its ranks. The averaging makes means over all ranks of them. With SGD and
    ``sync_every=1`` that is the unsharded model on the global batch, up to rounding. An adaptive optimizer sees each
    replica's own gradients, and its states are averaged with the tables (unless ``sync_optimizer=False``); with
    ``sync_every`` above 1 every optimizer drifts in between, as local SGD does. Tables with an ordinary optimizer are
    averaged, but its states are not: they differ between replicas.

    Every rank must make the same number of training forwards (forwards with gradients enabled). Each replica may make
    other forwards, such as evaluations under ``torch.no_grad``, which broadcast buffers inside the replica
    only. Call :meth:`sync_replicas` before one.

    Args:
        module: the model, its collections already sharded inside the replica.
        plan: where the tables are inside a replica.
        context: shared by the sharded collections.
        group: the process group of all ranks. None on one rank.
        groups: the replicas.
        options: how often they are averaged.
        dense: who averages the dense part's gradients.

    Attributes:
        replica_groups: the replicas, and which of them this rank is in.
        replica_options: how often they are averaged.
        steps_since_sync: training steps begun since the copies were last equal.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        context: ModelContext,
        group: dist.ProcessGroup | None,
        *,
        groups: ReplicaGroups,
        options: Replicas,
        dense: DenseWrap | DenseOptions = "ddp",
    ) -> None:
        super().__init__(module, plan, context, group, dense=dense)
        self.replica_groups = groups
        self.replica_options = options
        context.everyone = groups.everyone or context.headers
        self.steps_since_sync = 0
        self._counts_steps, self._has_begun, self._counted = True, False, 0
        self._is_inside, self._agrees_later = False, False
        context.life_cycle.forward_begins.insert(0, weak_hook(self._begin))
        context.life_cycle.backward_begins.append(weak_hook(self._backward_begins))
        self._averager = None if groups.across is None else Averager(groups.across)
        context.headers.before_raising = weak_hook(self._agree_later)
        if groups.everyone is not None:  # the groups were made for these replicas
            end_with(self._averager, groups.across)
            end_with(context.collectives, groups.within)  # which a served copy has, too
        if self._reducer is not None:
            self._reducer.evaluates = groups.within
        if self._averager is not None:
            # As the dense part's first values, rank 0's: the mean of copies drawn from different seeds would be smaller
            # than a draw.
            self._averager.copy_first(weight for _, weight in self._weights())

    @passed_over  # as ShardedModel.forward, like the calls below
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. A training forward first averages the replicas if that is due.

        Raises:
            InputError: on every rank of every replica at the same step, if a training forward fails on any, except on a
                rank whose model's own code failed, or if the ranks are in different steps. An AnomalyError, if that is
                what a rank has raised.
            PeerError: if another rank is gone.
        """
        if self.replica_groups.everyone is None or not self._is_step():
            return super().forward(*args, **kwargs)
        self._has_begun, self._counted, self._is_inside = False, 0, True
        try:
            try:
                result = super().forward(*args, **kwargs)
            except Exception as error:
                if is_own(error) or (is_shared(error) and not isinstance(error, PeerError)):
                    self._agree(self.replica_groups.everyone, error)
                raise
            self._agree(self.replica_groups.everyone, None)
        except BaseException:
            self._forget_step()
            raise
        finally:
            self._is_inside = False
        return result

    def _forget_step(self) -> None:
        """A forward that fails, on all ranks, is no step."""
        self.steps_since_sync -= self._counted
        self._has_begun, self._counted, self._agrees_later = False, 0, False

    @left_alone
    def _is_step(self) -> bool:
        """Whether the forward that begins is a training forward, which no backward computes again."""
        return torch.is_grad_enabled() and not self.context.gradients.computes_again

    def _begin(self) -> None:
        """A training forward begins, or a call of a scripted program, whose forwards end where they go back."""
        if self._has_begun:
            return
        if self.steps_since_sync >= self.replica_options.sync_every:
            self._average_copies()
        self._has_begun, self._agrees_later = True, not self._is_inside
        self._counted = int(self._counts_steps)
        self.steps_since_sync += self._counted

    def _backward_begins(self) -> None:
        self._agree_later(None)
        self._has_begun = False

    def _agree_later(self, error: Exception | None) -> None:
        """:meth:`_agree` on a forward of a scripted program: where it fails in a replica, or else in its backward."""
        if error is not None and not torch.is_grad_enabled():
            return  # of an evaluation between the two, which this replica makes alone
        if self._agrees_later and self.replica_groups.everyone is not None:
            self._agrees_later = False
            try:
                self._agree(self.replica_groups.everyone, error)
            except BaseException:
                self._forget_step()
                raise

    @left_alone
    def sync_replicas(self) -> None:
        """Average the tables, and their fused optimizers' states, over the replicas now, and broadcast buffers from
        rank 0. Every rank calls it.

        Before an evaluation or ``state_dict()``; :func:`shardrec.save_checkpoint` calls it by itself. Restarts the
        count for ``sync_every``. Does nothing on one replica.

        Raises:
            PeerError: if another rank is gone or did not answer within the process group's timeout.
        """
        self._average_copies()
        if self._reducer is not None:
            self._reducer.broadcast_buffers(to_all=True)

    @left_alone
    def _average_copies(self) -> None:
        if self._averager is not None:
            self._averager.average(self._averaged(self.replica_options))
        self.restart_count()

    def restart_count(self) -> None:
        """The copies are equal. A scripted forward before has no backward any more."""
        self.steps_since_sync, self._has_begun = 0, False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the dense part's gradients without averaging them, as DistributedDataParallel.no_sync does.

        The forwards inside and the first one after it count as one step for ``sync_every``.
        """
        before, self._counts_steps = self._counts_steps, False
        try:
            with super().no_sync():
                yield
        finally:
            self._counts_steps = before

    @left_alone
    def _agree(self, everyone: Headers, error: Exception | None) -> None:
        """Return if the forward went well on every rank, or if ``error`` is this rank's own; else raise."""
        world_size = everyone.collectives.world_size
        step = 2 * (self.steps_since_sync - self._counted) + self._counts_steps
        fault = 0 if error is None else 2 if isinstance(error, AnomalyError) else 1
        header = torch.tensor([[fault, step]] * world_size, dtype=torch.int64)
        faults, steps = everyone.exchange(header).unbind(1)
        if bool(faults.any()):
            shared = self._shared(everyone, error, AnomalyError if int(faults.max()) == 2 else InputError)
            if error is None or is_shared(error):
                raise shared from error
            self.context.failures_told += 1
            return
        if bool((steps != steps[0]).any()):
            lines = [
                f"rank {rank}: {step // 2} step(s) since the last sync, {'outside' if step % 2 else 'inside'} no_sync"
                for rank, step in enumerate(steps.tolist())
            ]
            raise InputError(
                "the ranks are in different steps. Make equally many training forwards on every rank, and enter "
                "no_sync and call sync_replicas on all of them in the same way:\n  " + "\n  ".join(lines)
            )

    def _shared(self, everyone: Headers, error: Exception | None, kind: type[Exception]) -> Exception:
        """The error that ranks raise which have none of their own."""
        first, rank = self.replica_groups.ranks[self.replica_groups.replica][0], everyone.collectives.rank
        text = ""
        if error is not None:
            failure = f"rank {rank}: the model's forward failed: {quoted(error)}"
            text = _world_ranks(str(error), first) if is_shared(error) else failure
        texts = list(dict.fromkeys(filter(None, everyone.all_gather_text(text))))
        return kind(texts[0] if len(texts) == 1 else f"{len(texts)} replicas or ranks failed:\n" + "\n".join(texts))


def _world_ranks(text: str, first: int) -> str:
    """The message of a replica, which counts its own ranks, with the ranks of the whole group."""
    return re.sub(
        r"(^\s*|; )rank (\d+):", lambda match: f"{match[1]}rank {first + int(match[2])}:", text, flags=re.MULTILINE
    )
