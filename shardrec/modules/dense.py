"""Who averages the gradients of the dense part over the ranks: DistributedDataParallel, FSDP2, or the user.

[Note: frames that torch.compile must not see]
``torch.compile(model)`` compiles whatever Python function runs first in the model that it has not been told to leave
alone. DistributedDataParallel's own code is no part of a graph: dynamo would break at its logger, and with
``fullgraph=True`` give up. So its forward is spelled out here as one that is left alone, while what it calls is not.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.nn.parallel import DistributedDataParallel

from shardrec._dynamo import left_alone, passed_over
from shardrec.exchange.context import StepContext
from shardrec.exchange.delegating import DelegatingGroup
from shardrec.exchange.flight import flight_record
from shardrec.exchange.peers import meet, peer_error, peers

_WHAT = "gradient all-reduce"
_LOOK_EVERY = timedelta(seconds=0.5)
"""How long to wait for the CPU's all-reduces before looking whether a rank has told that it will not come."""

__all__ = ["DenseReducer", "DenseWrap", "set_gradient_sync", "wrap_dense"]

DenseWrap = Literal["ddp", "fsdp", "none"]
"""``ddp``: a copy on every rank, gradients all-reduced; ``fsdp``: sharded by FSDP2; ``none``: as it is, the user's."""


class _ReducedGroup(DelegatingGroup):
    """The process group that the reducer of DistributedDataParallel sees, which tells a rank that is gone in backward.

    The reducer waits in C++, where an error has no Python class. So each backward waits for its all-reduces here first:
    autograd runs callbacks in the order in which they are queued, and the reducer queues its own after its last bucket.

    Args:
        base: the group.
        raise_told: raises what another rank has told (:meth:`shardrec.exchange.collectives.Collectives.raise_told`).
    """

    def __init__(self, base: dist.ProcessGroup, raise_told: Callable[[str], None]) -> None:
        super().__init__(base)
        self._raise_told = raise_told
        self._flying: list[tuple[dist.Work, int, bool]] = []

    def allreduce(self, tensors: list[Tensor], *options: Any) -> dist.Work:  # type: ignore[override]
        """Issue an all-reduce of a bucket, and have it waited for at the end of this backward."""
        number = flight_record().begin(_WHAT, sum(tensor.nbytes for tensor in tensors))
        work: dist.Work = self.base.allreduce(tensors, *options)
        if not self._flying:
            torch.autograd.Variable._execution_engine.queue_callback(self._land)
        self._flying.append((work, number, tensors[0].is_cpu))
        return work

    def _land(self) -> None:
        flying, self._flying = self._flying, []
        for work, number, on_cpu in flying:
            while not self._done(work, on_cpu):
                self._raise_told(_WHAT)
            flight_record().end(number)

    def _done(self, work: dist.Work, on_cpu: bool) -> bool:
        """Wait, on the CPU only for a while; whether the work is done."""
        try:
            if not on_cpu:
                return bool(work.wait())
            try:
                return bool(work.wait(_LOOK_EVERY))
            except RuntimeError:
                return work.is_completed() and bool(work.wait())
        except RuntimeError as error:
            raise peer_error(self.base, _WHAT, error) from error


class DenseReducer(DistributedDataParallel):
    """DistributedDataParallel whose module can be compiled from outside, and whose backward raises PeerError.

    Args:
        module: the model.
        process_group: of the ranks.
        raise_told: raises what another rank has told (:meth:`shardrec.exchange.collectives.Collectives.raise_told`).
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup, raise_told: Callable[[str], None]) -> None:
        self._raise_told = raise_told
        meet(process_group)
        with peers(process_group, "start of DistributedDataParallel"):
            super().__init__(module, process_group=process_group)

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        # The reducer, made here, takes the group from this attribute, and does not keep its Python object alive.
        group, self._reduced = self.process_group, _ReducedGroup(self.process_group, self._raise_told)
        self.process_group = self._reduced
        super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.process_group = group

    @passed_over
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's forward, and the preparation of the reducer for its backward."""
        inputs, kwargs = _outside(self._pre_forward, *inputs, **kwargs)
        inside = _outside(self._inside_ddp_forward)
        _outside(inside.__enter__)
        try:
            output = self.module(*inputs, **kwargs)
        finally:
            _outside(inside.__exit__, None, None, None)
        return _outside(self._post_forward, output)


class _AllGather(DefaultAllGather):
    """FSDP2's, which tells a rank that is gone."""

    def __call__(  # FSDP2 gives keywords
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        with peers(group, "parameter all-gather"):
            return super().__call__(output_tensor, input_tensor, group, async_op)


class _ReduceScatter(DefaultReduceScatter):
    """FSDP2's, which tells a rank that is gone."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work:
        with peers(group, "gradient reduce-scatter"):
            return super().__call__(output_tensor, input_tensor, group, op, async_op)


@left_alone
def _outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def wrap_dense(
    module: nn.Module,
    wrap: DenseWrap,
    group: dist.ProcessGroup,
    tables: Collection[nn.Parameter],
    replicated: Collection[nn.Parameter],
    context: StepContext,
) -> nn.Module:
    """What to call in place of ``module`` so that its gradients are averaged; ``module`` may be changed in place.

    Args:
        module: the model, its collections sharded.
        wrap: how.
        group: of all ranks.
        tables: the parameters of cut tables, which are nobody's to average.
        replicated: those of replicated tables, which kernels read in place: DistributedDataParallel averages them.
        context: of the model.
    """
    if wrap == "none":
        return module
    ignored = {id(parameter) for parameter in tables}
    if wrap == "fsdp":
        mesh = DeviceMesh.from_group(group, context.device.type)
        sharded = fully_shard(module, mesh=mesh, ignored_params={*tables, *replicated})
        sharded.set_custom_all_gather(_AllGather())
        sharded.set_custom_reduce_scatter(_ReduceScatter())
        # Other parameters are new objects now.
        whole = {id(parameter) for parameter in replicated}
        ignored = {id(one) for one in module.parameters() if id(one) not in whole}
    names = [name for name, parameter in module.named_parameters() if id(parameter) in ignored]
    if not any(one.requires_grad and id(one) not in ignored for one in module.parameters()):
        return module
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return DenseReducer(module, group, context.collectives.raise_told)


def set_gradient_sync(module: nn.Module, on: bool) -> None:
    """Whether FSDP2, if it shards ``module``, averages gradients in the coming backwards."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(on)
