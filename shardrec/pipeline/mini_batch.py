"""Runs one mini-batch through a pipeline: the caller's work around the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shardrec.errors import ConfigError, PeerError, PipelineError
from shardrec.pipeline.message import Key, Mailbox, Message
from shardrec.pipeline.microbatch import batch_size, gather, scatter, sizes_of
from shardrec.pipeline.recompute import Modes, RandomStream
from shardrec.pipeline.schedule import Schedule, gpipe, in_order, only
from shardrec.pipeline.stage import Checkpoint, Stage, StageStep, Step
from shardrec.pipeline.stage_channel import PeerPort, Peers
from shardrec.pipeline.timeline import Recorder

_LOSS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Run:
    """A mini-batch.

    Args:
        stages: of this process.
        peers: the other ranks, over a group.
        threads: one for each stage, or None if the stages run in turn.
        input: of the first stage. Over a group, only the rank of that stage needs it.
        chunks: largest number of micro-batches.
        checkpoint: which of them compute the forward once more.
        recorder: records when stages compute and wait.
        with_gradients: whether a backward follows.

    Attributes:
        batches: number of micro-batches.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        peers: Peers | None,
        threads: ThreadPoolExecutor | None,
        input: object,
        *,
        chunks: int,
        checkpoint: Checkpoint,
        recorder: Recorder | None,
        with_gradients: bool,
    ) -> None:
        self._stages = stages
        self._peers = peers
        self._threads = threads
        self._first = stages[0].index == 0
        self._last = stages[-1].index == stages[-1].stages - 1
        self._sizes = sizes_of(self._agreed_size(input), chunks)
        self.batches = len(self._sizes)
        self._parts = [tree_flatten(part) for part in scatter(input, self._sizes)] if self._first else []
        stops = {"always": self.batches, "except_last": self.batches - 1, "never": 0}
        self._step = Step(
            with_gradients=with_gradients,
            batches=self.batches,
            checkpointed=stops[checkpoint],
            modes=Modes({stage.device.type for stage in stages}),
            recorder=recorder,
        )
        self._port = Mailbox()
        self._steps: dict[int, StageStep] = {}
        self._sent: list[Tensor | None] = []  # of the input, to the first stage
        self._output_rows: list[list[int]] = []  # per leaf and micro-batch
        self._went_back = False

    def set_loss(self, target: object, loss_fn: Callable[[Any, Any], Tensor], *, mean: bool) -> None:
        """Let the last stage compute the loss. A faulty target is that stage's failure."""
        total, targets = sum(self._sizes), [target] * self.batches
        fault: Exception | None = None
        try:
            if self._last and target is not None:
                size = batch_size(target, "the target")
                if size != total:
                    raise ConfigError(f"the target has {size} samples and the input has {total}: give one for each")
                device = self._stages[-1].device
                here = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, target)
                targets = scatter(here, self._sizes)
        except (TypeError, ConfigError) as error:
            fault = error

        def loss(batch: int, output: object) -> Tensor:
            if fault is not None:
                raise fault
            value = loss_fn(output, targets[batch])
            if not isinstance(value, Tensor) or value.dim() or value.dtype not in _LOSS_DTYPES:
                seen = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"loss_fn returned {seen}: it has to return one floating-point number, a 0-d tensor")
            return value * (self._sizes[batch] / total) if mean and total else value

        self._step.loss = loss

    def execute(self, schedule: Schedule) -> None:
        """Let the stages of this process do their part.

        Raises:
            Exception: what a stage of this process raised.
            PipelineError: if one of another process failed.
            PeerError: if another rank is gone.
        """
        peers, threads = self._peers, self._threads
        if peers is not None:
            stage = self._stages[0]
            expected = [key for action in schedule[stage.index] for key in stage.taken(action)]
            self._port = PeerPort(peers, expected, self._step.recorder)
        if not self._steps:
            self._begin(on_threads=threads is not None)
        if threads is not None:
            self._on_threads(threads, schedule)
        else:
            self._in_turn(schedule)
        if peers is not None:
            self._end_together(peers)
        for index, step in self._steps.items():
            if step.failure is not None and step.failure.stage == index and step.failure.error is not None:
                raise step.failure.error

    def _begin(self, *, on_threads: bool) -> None:
        """Hand the first stage its micro-batches."""
        # See [Note: random numbers of stages on the CPU].
        seed = int(torch.randint(2**62, ())) if on_threads else 0
        for stage in self._stages:
            stream = RandomStream(seed + stage.index) if on_threads else None
            self._steps[stage.index] = StageStep(stage, self._step, self._port, stream)
        for batch, (leaves, spec) in enumerate(self._parts):
            asks = [self._step.with_gradients and leaf is not None and leaf.requires_grad for leaf in leaves]
            # Views of one tensor count in-place changes together. Each micro-batch's are its own.
            detached = [None if leaf is None else leaf.data for leaf in leaves]
            self._sent += detached
            self._port.send(Key(-1, 0, batch), Message(leaves=detached, spec=spec, differentiable=asks))

    def _on_threads(self, threads: ThreadPoolExecutor, schedule: Schedule) -> None:
        futures = [threads.submit(step.run, schedule[index]) for index, step in self._steps.items()]
        try:
            # A failure is not an exception here. Only an interrupt is, from a stage or from this thread.
            done, _ = wait_for(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            self._port.give_up(PipelineError("the step was interrupted"))
            wait_for(futures)
            raise

    def _in_turn(self, schedule: Schedule) -> None:
        """Run on this thread, in an order in which only messages of other ranks are waited for."""
        with ExitStack() as stack:
            for step in self._steps.values():
                stack.enter_context(step.at_work())
            for stage, action in chain.from_iterable(in_order(schedule)):
                if stage in self._steps:
                    self._steps[stage].do(action)

    def _end_together(self, peers: Peers) -> None:
        """Learn of failures on other ranks, and tell them of this one's."""
        failure = self._steps[peers.rank].failure
        raised = None if failure is None or failure.stage != peers.rank else failure.error
        if isinstance(raised, PeerError):
            raise raised
        self._port.finish()
        failures = peers.gather(None if failure is None else failure.told())
        text_of = {failure.stage: failure.text for failure in failures if failure is not None}
        if not text_of:
            return
        if raised is not None:
            raise raised
        texts = [f"stage {stage} failed, on its rank:\n{text}" for stage, text in text_of.items()]
        raise PipelineError("\n".join(texts))

    def _agreed_size(self, input: object) -> int:
        """Samples of the mini-batch, which the first stage knows."""
        peers = self._peers
        if peers is None:
            return batch_size(input)
        size, text, fault = 0, "", None
        if self._first:
            try:
                size = batch_size(input)
            except (TypeError, ConfigError) as error:
                text, fault = f"{type(error).__name__}: {error}", error
        size, text = peers.gather((size, text))[0]
        if text:
            raise fault or PipelineError(f"the first stage cannot take its input: {text}")
        return size

    def _results(self) -> list[Message]:
        """What the last stage returned, per micro-batch."""
        stages = self._stages[0].stages
        return [self._port.take(Key(stages - 1, stages, batch)) for batch in range(self.batches)]

    def values(self) -> object:
        """The output, without a graph. None on ranks without the last stage."""
        return _gathered(self._results()) if self._last else None

    def output(self) -> object:
        """The output, from which a backward goes back through the pipeline."""
        results = self._results()
        leaves, spec = tree_flatten(_gathered(results))
        asks = [any(flags) for flags in zip(*(message.differentiable for message in results), strict=True)]
        pieces_of_leaves = zip(*(message.leaves for message in results), strict=True)
        self._output_rows = [[0 if leaf is None else leaf.size(0) for leaf in pieces] for pieces in pieces_of_leaves]
        token = torch.zeros(0, dtype=torch.float32, requires_grad=True)
        attached = _Attach.apply(self, leaves, asks, token, *self._input())  # type: ignore[no-untyped-call]
        return tree_unflatten(attached, spec)

    def backward(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients of :meth:`_input`, from the gradients of the output's leaves."""
        if self._went_back:
            raise PipelineError("a pipeline's output goes back once: call forward again, or add the losses up")
        self._went_back = True
        stages = self._stages[0].stages
        pieces = [
            [None] * self.batches if gradient is None else gradient.split(rows)
            for gradient, rows in zip(gradients, self._output_rows, strict=True)
        ]
        for batch in range(self.batches):
            self._port.send(Key(stages, stages - 1, batch), Message(leaves=[piece[batch] for piece in pieces]))
        self.execute(only("B", gpipe(stages, self.batches)))
        return self._input_gradients()

    def input_backward(self) -> None:
        """After a step: propagate the input's gradients to the graph that it came from."""
        if not self._first:
            return
        leaves = self._input()
        edges = [get_gradient_edge(leaf) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        pairs = zip(edges, self._input_gradients(), strict=True)
        reached = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
        if reached:
            torch.autograd.backward([edge for edge, _ in reached], [gradient for _, gradient in reached])

    def _input(self) -> list[Tensor | None]:
        """The leaves of the micro-batches, one after the other. Autograd knows how they were cut out of the input."""
        return [leaf for leaves, _ in self._parts for leaf in leaves]

    def _input_gradients(self) -> list[Tensor | None]:
        for leaf, sent in zip(self._input(), self._sent, strict=True):
            # Changed in place, which the graph before may have to know.
            if leaf is not None and sent is not None and sent._version:
                increment_version(leaf)
        grads = [gradient for batch in range(self.batches) for gradient in self._port.take(Key(0, -1, batch)).leaves]
        return [
            None if gradient is None or leaf is None else gradient.to(leaf.device)
            for gradient, leaf in zip(grads, self._input(), strict=True)
        ]

    def total_loss(self) -> Tensor:
        """The sum over micro-batches, on every rank."""
        peers, device = self._peers, self._stages[-1].device
        total = torch.zeros((), device=device)
        if self._last:
            parts = [message.leaves[0] for message in self._results()]
            total = torch.stack([part for part in parts if part is not None]).sum()
        if peers is not None:
            last = self._stages[-1].stages - 1
            total = total.to(peers.gather(total.dtype)[last])
            peers.broadcast(total, last)
        return total


class _AttachContext(FunctionCtx):
    run: Run


class _Attach(torch.autograd.Function):
    """Puts a pipeline's output into the caller's graph."""

    @staticmethod
    def forward(
        ctx: _AttachContext,
        run: Run,
        leaves: list[Tensor | None],
        asks: list[bool],
        token: Tensor,
        *inputs: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        unasked = (leaf for leaf, asked in zip(leaves, asks, strict=True) if leaf is not None and not asked)
        ctx.mark_non_differentiable(*unasked)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: _AttachContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *ctx.run.backward(list(gradients))


def _gathered(results: list[Message]) -> object:
    nests = []
    for message in results:
        assert message.spec is not None, "what goes forward tells how it is nested"
        nests.append(tree_unflatten(list(message.leaves), message.spec))
    return gather(nests)
