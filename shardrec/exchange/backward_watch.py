"""Notices when a backward begins, and tells the other ranks if it raises here while they wait for its gradients.

[Note: how a backward that raises is noticed]
autograd lacks a hook for a node that raises. But a queued callback of a backward lives as long as that backward: it is
called when all nodes are done, and freed without a call when a node has raised. It is freed before the exception is
converted to Python, so its text is read one step later, by a trace function of the frame in which the exception then
appears. The trace function is set for this one step, and not if another (a debugger's, coverage's) is set.

What does not replace the trace function: ``sys.exc_info`` is empty in ``__del__``; the user calls ``backward``, so no
frame of this library is there to catch the exception; ``sys.monitoring`` needs Python 3.12. Without the exception's
text, the other ranks would say only that a rank "raised in backward".
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward, get_gradient_edge
from torch.utils._pytree import tree_leaves

from shardrec.errors import ShardrecError


def weak_hook(method: Callable[..., None]) -> Callable[..., None]:
    """A hook that calls a method while its object lives, and does not keep it alive.

    torch keeps each parameter passed to ``apply_optimizer_in_backward`` alive, with its hooks: a bound method as a hook
    would keep the model alive.
    """
    weak = WeakMethod(method)

    def hook(*arguments: Any) -> None:
        bound = weak()
        if bound is not None:
            bound(*arguments)

    return hook


def accumulates_in(parameter: Tensor) -> bool:
    """Whether the running backward accumulates a gradient in this parameter if it reaches it."""
    return parameter.requires_grad and _will_accumulate(get_gradient_edge(parameter).node)


def _will_accumulate(leaf: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # of torch.autograd.grad with respect to this leaf, which accumulates nothing
        return False


def reaches_a_leaf() -> bool:
    """Whether the running backward accumulates a gradient in any leaf behind the node that it is at."""
    nodes: list[Any] = [torch._C._current_autograd_node()]
    known = {None, *nodes}
    for node in nodes:
        if hasattr(node, "variable") and _will_accumulate(node):
            return True
        behind = {function for function, _ in node.next_functions} - known
        known |= behind
        nodes += behind
    return False


class BackwardWatch:
    """Notices backwards that begin, and those that raise.

    Args:
        report_failure: called with a text that says what happened, unless all ranks raise the same error
            (:class:`ShardrecError`).
        begins: called in each backward, at its first step in the model.
    """

    def __init__(self, report_failure: Callable[[str], None], begins: Callable[[], None] | None = None) -> None:
        self._report_failure = report_failure
        self._begins = begins
        self._task = -1

    def watch(self, outputs: object) -> None:
        """Watch backwards from the time that they reach one of the tensors in ``outputs``."""
        leaves = [outputs] if isinstance(outputs, Tensor) else tree_leaves(outputs)
        nodes = {leaf.grad_fn for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None}
        for node in nodes:
            node.register_prehook(lambda _: self.begin())

    def begin(self) -> None:
        """Watch the running backward. Call it inside a backward. Only its first call in each backward has an effect."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task = task
            torch.autograd.Variable._execution_engine.queue_callback(_Watched(self._report_failure))
            if self._begins is not None:
                self._begins()


class _Watched:
    """Lives as long as a backward. See [Note: how a backward that raises is noticed]."""

    def __init__(self, report_failure: Callable[[str], None]) -> None:
        self._report_failure: Callable[[str], None] | None = report_failure

    def __call__(self) -> None:
        self._report_failure = None

    def __del__(self) -> None:
        report_failure = self._report_failure
        if report_failure is None:
            return
        frame: FrameType | None = sys._getframe().f_back
        if frame is None or frame.f_code is not _engine_run_backward.__code__ or sys.gettrace() is not None:
            report_failure("raised in backward")
            return

        def raised(frame: FrameType, event: str, value: Any) -> None:
            sys.settrace(None)
            frame.f_trace = None
            if event == "exception" and not isinstance(value[1], ShardrecError):
                report_failure(f"raised in backward: {value[0].__name__}: {value[1]}")

        frame.f_trace = raised
        sys.settrace(lambda *_: None)


class _BegunForwards:
    """Models with a forward that awaits its backward: the same on all ranks, whatever their garbage collectors have
    left."""

    def __init__(self) -> None:
        self._ended = 0  # backwards so far
        self._begun: dict[int, int] = {}  # by model, the backwards that had ended when its forward began

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, model: object) -> None:
        """A forward of a model begins."""
        self._begun[id(model)] = self._ended

    def end(self, model: object) -> None:
        """The backward of a model ends. Forwards that had none since a few of others are taken for dropped."""
        self._ended += 1
        self._begun.pop(id(model), None)
        begun = list(self._begun.items())  # models of other threads may begin
        self._begun = {other: ended for other, ended in begun if self._ended - ended < 4}


BEGUN = _BegunForwards()
