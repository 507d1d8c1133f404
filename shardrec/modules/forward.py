"""What surrounds a sharded model's own forward: its duties, and how the other ranks hear of a failure."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec._dynamo import left_alone
from shardrec.exchange.headers import is_own
from shardrec.exchange.peers import failed_in_a_collective, peer_error
from shardrec.modules.compiled import compiled_step, leaves
from shardrec.modules.optim import FusedOptimizers
from shardrec.step.calls_ahead import Ahead
from shardrec.step.context import ModelContext


class AheadOfSome(Ahead):
    """Calls made ahead of a forward that also makes others.

    Their rows are exchanged at its beginning. So whatever the other ranks wait for in it, if it fails on this one, is a
    header: of another call, or of the next batch.
    """


class _Model(Protocol):
    """What a forward needs of a :class:`~shardrec.ShardedModel`."""

    context: ModelContext
    group: dist.ProcessGroup | None
    made_fused_optimizer: FusedOptimizers | None

    @property
    def is_traced(self) -> bool: ...

    @property
    def updates_above_lookups(self) -> bool: ...

    def warn_without_step(self) -> None: ...

    def fail(self, error: Exception, inputs: object) -> None: ...


class _Forward:
    """A forward of a model.

    Attributes:
        compiled: the settings of its compiled parts, if there can be any.
        is_outermost: whether it is not inside of another forward of the model.
    """

    __slots__ = ("args", "compiled", "is_outermost", "kwargs", "model")

    def __init__(
        self,
        model: _Model,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        compiled: AbstractContextManager[None] | None = None,
    ) -> None:
        self.model, self.args, self.kwargs, self.compiled = model, args, kwargs, compiled
        context = model.context
        state = context.forward_state
        state.refusal = ""
        if context.is_alone_on_device:
            context.headers.flags.check()
            context.step.reads_flags_late = torch.is_grad_enabled() and not model.updates_above_lookups
        if context.collectives.world_size > 1:
            state.dense_signature = dense_signature((args, kwargs))
        if context.options.updates_at_step and model.made_fused_optimizer is None and torch.is_grad_enabled():
            model.warn_without_step()
        context.gradients.begin_forward()
        if compiled is not None:
            compiled.__enter__()
        self.is_outermost = context.step.begin_forward()


def _begin_compiled(model: _Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Forward:
    return _Forward(model, args, kwargs, compiled_step((args, kwargs), traced=model.is_traced))


def _before_module(model: _Model) -> None:
    """What precedes the model's own forward. See :meth:`shardrec.step.step.Step.launch_ahead`."""
    step, reducer = model.context.step, model.context.gradients.reducer
    if isinstance(step.ahead, AheadOfSome) and model.context.collectives.world_size > 1:
        step.serve(step.ahead)
    elif step.ahead is not None:
        step.launch_ahead()
    if reducer is not None:
        reducer.broadcast_buffers()


def _end(forward: _Forward, error: BaseException | None, output: Any = None) -> Any:
    """End a forward. Gives its output, watched: if a backward from it raises, the other ranks are told."""
    model, context = forward.model, forward.model.context
    context.step.reads_flags_late = False
    try:
        try:
            if forward.is_outermost:
                context.step.end_forward(error)
            else:
                context.step.lock.release()
        finally:
            if forward.compiled is not None:
                forward.compiled.__exit__(None, None, None)
    except Exception as late:
        # Of an exchange that waited for more calls.
        _tell(forward, late)
        raise
    if error is not None:
        _tell(forward, error)
    elif model.group is not None and torch.is_grad_enabled():
        context.gradients.backward.watch(output)
    elif context.headers.flags.unread:
        context.headers.flags.check_in_backward(output)
    context.forward_state.dense_signature = ""
    return output


def _tell(forward: _Forward, error: BaseException) -> None:
    """Tell the other ranks of an error, unless they also raise it."""
    model, context = forward.model, forward.model.context
    try:
        # For calls made ahead, the other ranks have the headers. The code that made the calls tells the others.
        if isinstance(error, Exception) and is_own(error):
            if model.group is not None and failed_in_a_collective(error):
                # A buffer's broadcast, a collective of the model's own, one of a compiled or scripted program.
                raise peer_error(model.group, "forward", error) from error
            if not context.step.ahead:
                model.fail(error, (forward.args, forward.kwargs))
    finally:
        context.forward_state.dense_signature = context.forward_state.refusal = ""


EAGER = _Forward, _before_module, _end
COMPILED = left_alone(_begin_compiled), left_alone(_before_module), left_alone(_end)
"""The functions around a forward without compiled parts, and the functions that torch.compile leaves alone."""


def dense_signature(inputs: object) -> str:
    """The dtypes of the tensors among a model's inputs, except ids, as a text that ranks compare."""
    dtypes = set()
    for leaf in leaves(inputs):
        if isinstance(leaf, Tensor):
            dtypes.add(str(leaf.dtype).removeprefix("torch."))
    return " and ".join(sorted(dtypes))
