"""A sharded module's forward as operators: how compiled and live scripted programs reach the eager model.

::

    forward    features ── issue_lookup ──► ticket ── arrive ──► value
    backward   tables updated ◄── finish_backward ── ticket ◄── give_gradient ── gradient

An operator takes tensors, numbers and text, and calls the module: it uses the step, exchange and kernels of eager
mode, and so has every feature of the eager model. Code between two of the operators overlaps with the exchange. Updates
of tables are hidden from a compiler, which therefore cannot copy, move or repeat them.

[Note: the ticket]
A call in progress is stored under a number, which is passed from operator to operator, and to backward, as a tensor.
The call is freed with that tensor, whether or not it was waited for. A second, empty tensor orders the operators of
backward: the update comes after the operator that sends the gradient.

[Note: two halves of a backward]
The modules that share an exchange share its backward. Its graph is cut where the rows were sent. The first half, which
sends the gradients, runs when each value that arrived has been given its own, or at the first ``finish_backward``: a
value without a gradient by then is not part of the loss. The second, which receives them and updates the tables, runs
at the end of the program's backward, for all exchanges together, so that a table is updated once. Where weights of ids
wait for their gradients, they are received at the first ``finish_backward``, and the tables still updated at the end.

[Note: inputs are copied]
A compiler may reuse the memory of an input that it no longer needs while a queued call still reads it.

Shapes: B samples, N ids, D columns of the output, U features, L lookups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError, InputError
from shardrec.exchange.batch import Expectation, form_fault, length_fault
from shardrec.exchange.gradients import Gradients
from shardrec.modules.collection import ShardedCollection
from shardrec.step.context import ModelContext
from shardrec.step.exchange import finish
from shardrec.step.records import Exchange, InFlight

_LIBRARY = torch.library.Library("shardrec", "FRAGMENT")
_LIBRARY.define(
    "issue_lookup(Tensor anchor, Tensor[] replicas, Tensor values, Tensor? lengths, Tensor? offsets, Tensor? weights, "
    "Tensor? strides, Tensor? inverse, str[] keys, str[] inverse_keys, SymInt stride, int number, "
    "bool weights_require_grad, bool gradients, int caller) -> (Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define(
    "arrive(Tensor order, Tensor ticket, Tensor values, SymInt? rows, int width, int lookups, bool ids, "
    "ScalarType dtype, int number) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.cudagraph_unsafe,
)
_LIBRARY.define("give_gradient(Tensor gradient, Tensor ticket, int number) -> Tensor", tags=torch.Tag.cudagraph_unsafe)
_LIBRARY.define(
    "finish_backward(Tensor order, Tensor ticket, SymInt weights, Tensor[] replicas, int number) -> Tensor[]",
    tags=torch.Tag.cudagraph_unsafe,
)

_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU,
    torch._C.DispatchKey.AutogradCUDA,
    torch._C.DispatchKey.AutogradOther,
    torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.ADInplaceOrView,
)


@contextmanager
def _with_autograd(gradients: bool) -> Iterator[None]:
    """Operators called inside use autograd again, which is disabled below an operator with a gradient.

    fbgemm's training lookups need this even without ``gradients``: on the CPU they are registered for autograd only.
    """
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        exclude = exclude.remove(key)
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.set_grad_enabled(gradients):
        yield


@contextmanager
def _in_mode(module: ShardedCollection, training: bool | None) -> Iterator[None]:
    """Run calls made inside with the module in training mode or not. None keeps its mode."""
    was_training = module.training
    module.training = was_training if training is None else training
    try:
        yield
    finally:
        module.training = was_training


class _Issued:
    """A call under a ticket, from its issue to the last of its backwards.

    Args:
        call: the module's.
        weights: (N,) of its ids if they take a gradient, a leaf; else None.
        replicas: parameters of the module's replicated tables.
    """

    def __init__(self, call: InFlight, weights: Tensor | None, replicas: Sequence[Tensor]) -> None:
        self.call = call
        self.weights = weights
        self.replicas = replicas
        self.value: Tensor | None = None
        self.backward: _Backward | None = None


class _Backward:
    """The backward of one exchange, in two halves."""

    def __init__(self, exchange: Exchange) -> None:
        self._sent, self._leaves = exchange.cut_graph()
        self._arrived: list[weakref.ref[_Issued]] = []
        self._given: dict[_Issued, Tensor] = {}
        self._returning: list[tuple[Tensor, Tensor]] = []
        self._gradients: dict[int, Tensor] = {}  # of replicas and weights, by id

    def arrived(self, issued: _Issued) -> None:
        """A value that will be given its gradient, or take no part in the loss."""
        self._arrived.append(weakref.ref(issued))

    def give(self, issued: _Issued, gradient: Tensor) -> None:
        """Give the gradient of a call's value. The last one sends all of them."""
        self._given[issued] = gradient
        if all(reference() is None or reference() in self._given for reference in self._arrived):
            self._send()

    def returning(self) -> list[tuple[Tensor, Tensor]]:
        """What :func:`_receive` takes, once."""
        if self._given:
            self._send()
        returning, self._returning = self._returning, []
        return returning

    def take(self, of: Tensor) -> Tensor | None:
        """The gradient of a leaf of the first half, once. None without one."""
        return self._gradients.pop(id(of), None)

    def _send(self) -> None:
        value_gradients, self._given = self._given, {}
        others = {
            id(tensor): tensor
            for issued in value_gradients
            for tensor in (*issued.replicas, issued.weights)
            if tensor is not None
        }
        inputs = [*self._leaves, *(tensor for tensor in others.values() if tensor.requires_grad)]
        values = [issued.value for issued in value_gradients if issued.value is not None]
        # Not backward(): the replicas' gradients are reduced where the program's own graph accumulates them.
        with _with_autograd(True):
            gradients = torch.autograd.grad(
                values, inputs, list(value_gradients.values()), retain_graph=True, allow_unused=True
            )
        for tensor, gradient in zip(inputs, gradients, strict=True):
            if gradient is not None:
                self._gradients[id(tensor)] = gradient
        for sent, leaf in zip(self._sent, self._leaves, strict=True):
            returned = self.take(leaf)
            if returned is not None:
                self._returning.append((sent, returned))


def _receive(of: Gradients, *, is_end: bool) -> None:
    """Receive the gradients of some exchanges. At the end of the program's backward, update the tables."""
    if of.returning:
        sent, gradients = zip(*of.returning, strict=True)
        of.returning.clear()
        with _with_autograd(True):
            torch.autograd.backward(sent, gradients, retain_graph=True)
    of.going_back.clear()
    while is_end and of.open_lookups:
        of.open_lookups.pop(0).update_kept()


def _receive_early(of: Gradients) -> None:
    """Receive the gradients of some exchanges, and keep those of tables for the end of the program's backward."""
    lookups = [lookup for exchange in of.going_back for lookup in exchange.lookups]
    of.open_lookups += lookups
    for lookup in lookups:
        lookup.is_open = True
    try:
        _receive(of, is_end=False)
    finally:
        for lookup in lookups:
            lookup.is_open = False


_BACKWARDS: weakref.WeakKeyDictionary[Exchange, _Backward] = weakref.WeakKeyDictionary()


class Program:
    """The implementation of the operators of one sharded module.

    Args:
        module: the module.
        context: of its model.
        expect: what its input must look like.
        results: of the call's output, what ``arrive`` returns: the value, which takes a gradient, and of rows for each
            id the ids and their number per lookup.
        replicas: parameters of the module's replicated tables. A reducer averages their gradients.
    """

    def __init__(
        self,
        module: ShardedCollection,
        context: ModelContext,
        expect: Expectation,
        results: Callable[[Any], tuple[Tensor, Tensor, Tensor]],
        replicas: Sequence[Tensor],
    ) -> None:
        self._module = module
        self._context = context
        self._expect = expect
        self._results = results
        self._replicas = replicas
        self._tickets = count()
        self._kept: dict[int, _Issued] = {}
        self._fault = ""
        self.number = next(_NUMBERS)
        _PROGRAMS[self.number] = self

    def issue(
        self, features: KeyedJaggedTensor, weights_require_grad: bool, gradients: bool, scripted: bool | None
    ) -> Tensor:
        """Queue a call. Gives its ticket.

        Args:
            features: of the local batch.
            weights_require_grad: their weights take a gradient.
            gradients: there will be a backward.
            scripted: whether TorchScript, which calls, is in training mode. None if it is not TorchScript.
        """
        if self._fault:
            raise ConfigError(self._fault)
        ticket = torch.tensor(next(self._tickets))
        number = int(ticket)
        weights = features.weights_or_none()
        if torch._C._current_graph_task_id() == -1:
            self._context.gradients.returning.clear()  # of a backward that raised
            self._context.gradients.going_back.clear()
            self._context.gradients.open_lookups.clear()
        with _with_autograd(gradients), _in_mode(self._module, scripted):
            if scripted is not None:  # no forward of the model has done so
                self._context.gradients.begin_forward()
            if weights_require_grad and gradients:
                weights.requires_grad_()
            call = self._module.call(features, by_operator=True, scripted=scripted is not None)
        weights = weights if weights_require_grad and gradients else None
        issued = self._kept[number] = _Issued(call, weights, self._replicas)
        call.user = weakref.ref(issued)
        weakref.finalize(ticket, self._kept.pop, number, None).atexit = False
        return ticket

    @staticmethod
    def expire(module: ShardedCollection, fault: str) -> None:
        """Let the programs that use a module raise a ConfigError at their next call of it."""
        for program in list(_PROGRAMS.values()):
            if program._module is module:
                program._fault = fault

    def arrive(self, ticket: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for a call's rows. The value first."""
        issued = self._kept[int(ticket)]
        call = issued.call
        step = self._context.step
        with _with_autograd(call.mode.gradients), call.mode.entered():
            step.use(call)
            exchange = call.exchange
            if call.mode.gradients and exchange is not None:
                if exchange not in _BACKWARDS:
                    _BACKWARDS[exchange] = _Backward(exchange)
                issued.backward = _BACKWARDS[exchange]
            value, ids, numbers = self._results(finish(call))
            if issued.backward is not None and value.requires_grad:
                issued.value = value
                issued.backward.arrived(issued)
        return value.detach(), ids, numbers

    def give_gradient(self, gradient: Tensor, ticket: Tensor) -> None:
        """The gradient of a call's value is there."""
        issued = self._kept[int(ticket)]
        # Here, since the exchange is sent by a backward inside of the program's.
        self._context.gradients.backward.begin()
        if self._context.collectives.program_goes_back is not None:
            self._context.collectives.program_goes_back()
        if issued.value is not None and issued.backward is not None:
            issued.backward.give(issued, gradient)

    def finish_backward(self, ticket: Tensor) -> tuple[Tensor | None, list[Tensor | None]]:
        """The tables are updated. Gives the gradients of the ids' weights and of the replicas."""
        issued = self._kept[int(ticket)]
        if issued.backward is None:
            return None, [None for _ in issued.replicas]
        gradients = self._context.gradients
        if not gradients.returning:
            torch.autograd.Variable._execution_engine.queue_callback(partial(_receive, gradients, is_end=True))
        gradients.returning += issued.backward.returning()
        assert issued.call.exchange is not None, "what has a backward was exchanged"
        gradients.going_back.append(issued.call.exchange)
        if issued.weights is not None:
            _receive_early(gradients)
        replicas = [issued.backward.take(replica) for replica in issued.replicas]
        if issued.weights is None:
            return None, replicas
        gradient, issued.weights.grad = issued.weights.grad, None
        from_backward = issued.backward.take(issued.weights)
        if gradient is None or from_backward is None:
            return from_backward if gradient is None else gradient, replicas
        return gradient + from_backward, replicas

    def refuse(self, features: KeyedJaggedTensor) -> None:
        """Stop the tracing of a batch with an invalid form.

        It would be compiled to a separate program, and each such form would use one of dynamo's limited recompilations.
        So the error is raised where the tracer asks for the shapes: nothing is compiled or kept, and the model's
        forward tells the other ranks.
        """
        fault = form_fault(features, self._expect)
        if fault is None and not features.variable_stride_per_key():  # else the sizes are in a tensor
            fault = length_fault(features.lengths(), [features.stride()] * len(features.keys()))
        if fault is not None:
            self._context.forward_state.refusal = fault
            raise InputError(fault)


_PROGRAMS: weakref.WeakValueDictionary[int, Program] = weakref.WeakValueDictionary()
"""By the numbers that operators call them by, for as long as their owners live."""

_NUMBERS = count()


def _program(number: int) -> Program:
    program = _PROGRAMS.get(number)
    if program is None:
        raise ConfigError(
            f"a compiled program uses sharded module number {number} of a sharded model that is gone, or that lived in "
            "another process. Compile the model again, and keep it for as long as the program runs"
        )
    return program


def _features(
    tensors: Sequence[Any], keys: Sequence[str], inverse_keys: Sequence[str], stride: int
) -> KeyedJaggedTensor:
    """The features of ``issue_lookup``. ``tensors`` are its arguments from ``values`` to ``inverse``."""
    values, lengths, offsets, weights, strides, inverse = tensors
    return KeyedJaggedTensor(
        keys=list(keys),
        values=values,
        weights=weights,
        lengths=lengths,
        offsets=offsets,
        stride=stride if strides is None else None,
        stride_per_key_per_rank=strides,
        inverse_indices=None if inverse is None else (list(inverse_keys), inverse),
    )


@torch.library.impl(_LIBRARY, "issue_lookup", "CompositeExplicitAutograd")
def _issue(anchor: Tensor, replicas: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    number, weights_require_grad, gradients, caller = arguments[9:]
    # A call of a traced program has a number of its own; TorchScript is -1 in training mode and else -2.
    scripted = None if caller >= 0 else caller == -1
    detached = [
        tensor if tensor is None else tensor.detach().clone() if scripted is None else tensor.detach()
        for tensor in arguments[:6]
    ]
    ticket = _program(number).issue(_features(detached, *arguments[6:9]), weights_require_grad, gradients, scripted)
    return anchor.new_zeros(0), ticket


@torch.library.impl(_LIBRARY, "arrive", "CompositeExplicitAutograd")
def _arrive(order: Tensor, ticket: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _program(arguments[-1]).arrive(ticket)


@torch.library.impl(_LIBRARY, "give_gradient", "CompositeExplicitAutograd")
def _give_gradient(gradient: Tensor, ticket: Tensor, number: int) -> Tensor:
    _program(number).give_gradient(gradient, ticket)
    return gradient.new_zeros(0, dtype=torch.float32)


@torch.library.impl(_LIBRARY, "finish_backward", "CompositeExplicitAutograd")
def _finish_backward(
    order: Tensor, ticket: Tensor, weights: int, replicas: Sequence[Tensor], number: int
) -> list[Tensor]:
    of_weights, others = _program(number).finish_backward(ticket)
    return [
        order.new_zeros(weights) if of_weights is None else of_weights.to(torch.float32),
        *(
            torch.zeros_like(replica) if gradient is None else gradient
            for gradient, replica in zip(others, replicas, strict=True)
        ),
    ]


def _issue_fake(anchor: Tensor, replicas: Sequence[Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    _program(arguments[9]).refuse(_features(arguments[:6], *arguments[6:9]))
    return anchor.new_empty(0), torch.empty((), dtype=torch.int64, device="cpu")


def _arrive_fake(order: Tensor, ticket: Tensor, values: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows, width, lookups, ids, dtype, _ = arguments
    if rows is None:
        rows = torch.library.get_ctx().new_dynamic_size()
    return (
        order.new_empty((rows, width), dtype=dtype),
        values.new_empty(rows if ids else 0),
        torch.empty(lookups, dtype=torch.int64, device="cpu"),
    )


def _give_gradient_fake(gradient: Tensor, ticket: Tensor, number: int) -> Tensor:
    return gradient.new_empty(0, dtype=torch.float32)


def _finish_backward_fake(
    order: Tensor, ticket: Tensor, weights: int, replicas: Sequence[Tensor], number: int
) -> list[Tensor]:
    return [order.new_empty(weights), *(torch.empty_like(replica) for replica in replicas)]


def _keep_issued(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    replicas, weights, ctx.number, weights_require_grad = inputs[1], inputs[5], inputs[11], inputs[12]
    ctx.save_for_backward(output[1], *replicas)
    ctx.mark_non_differentiable(output[1])
    ctx.names = len(inputs[9])
    ctx.weights = (weights.size(0), weights.dtype) if weights_require_grad else (0, None)


def _issued_backward(ctx: Any, order: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    ticket, *replicas = ctx.saved_tensors
    count, dtype = ctx.weights
    of_weights, *others = torch.ops.shardrec.finish_backward(order, ticket, count, replicas, ctx.number)
    # The anchor's gradient is what makes a compiler keep the update.
    anchor = of_weights[:0]
    weights = None if dtype is None else of_weights.to(dtype)
    # An empty list counts as a list of tensors.
    return anchor, others, None, None, None, weights, None, None, None, None if ctx.names else [], *[None] * 5


def _keep_arrived(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.number = inputs[-1]
    ctx.mark_non_differentiable(*output[1:])


def _arrived_backward(ctx: Any, gradient: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    (ticket,) = ctx.saved_tensors
    order = torch.ops.shardrec.give_gradient(gradient, ticket, ctx.number)
    return order, *[None] * 8


for _name, _fake in (
    ("issue_lookup", _issue_fake),
    ("arrive", _arrive_fake),
    ("give_gradient", _give_gradient_fake),
    ("finish_backward", _finish_backward_fake),
):
    torch.library.register_fake(f"shardrec::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("shardrec::issue_lookup", _issued_backward, setup_context=_keep_issued, lib=_LIBRARY)
torch.library.register_autograd("shardrec::arrive", _arrived_backward, setup_context=_keep_arrived, lib=_LIBRARY)
