"""One stage at work on the micro-batches of one step.

::

    forward of micro-batch i                                   backward of micro-batch i
      take    activation from stage s-1                          take    gradients from stage s+1,
              skips from the stages that stash them                      and from those that popped this one's skips
      compute layers (and the loss, in the last stage)           compute (recompute, if checkpointed,) autograd
      send    activation to stage s+1                            send    gradients to stage s-1,
              skips to the stages that pop them                          and to those that stashed what this one popped

Each stage has a separate graph per micro-batch. An autograd function catches the gradients of tensors that enter it; of
tensors that leave it, only the edge of the graph is kept. So the memory of an activation or skip is held by the stage
that computes with it, and by autograd if a backward needs its values.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_unflatten

from shardrec.errors import PipelineError
from shardrec.exchange.recomputation import in_pipeline
from shardrec.pipeline.message import Failure, Key, Mailbox, Message, flatten
from shardrec.pipeline.recompute import Modes, RandomState, RandomStream
from shardrec.pipeline.schedule import Action
from shardrec.pipeline.skip.routes import Route
from shardrec.pipeline.skip.tracker import SkipTracker, changed_in_place, use_skip_tracker, versions_of
from shardrec.pipeline.statistics import MiniBatchStatistics
from shardrec.pipeline.timeline import Recorder

Checkpoint = Literal["always", "except_last", "never"]
"""Which micro-batches keep no graph between forward and backward, but compute the forward once more."""


@dataclass(kw_only=True)
class Step:
    """The settings of a step for the stages of one process.

    Args:
        with_gradients: a backward follows.
        batches: number of micro-batches.
        checkpointed: number of micro-batches, from the first, that are computed once more.
        modes: of the caller.
        loss: from a micro-batch and the last stage's output to the minimized value. None: the caller sends gradients.
        recorder: of the timeline.
    """

    with_gradients: bool
    batches: int
    checkpointed: int
    modes: Modes
    loss: Callable[[int, object], Tensor] | None = None
    recorder: Recorder | None = None


class _BoundaryContext(FunctionCtx):
    caught: list[Tensor | None]


class _Boundary(torch.autograd.Function):
    """Tensors enter a stage's graph here. Their gradients end in ``caught``."""

    @staticmethod
    def forward(
        ctx: _BoundaryContext, caught: list[Tensor | None], token: Tensor, *leaves: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        return tuple(None if leaf is None else leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: _BoundaryContext, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.caught[:] = gradients
        return (None,) * (2 + len(gradients))


@dataclass
class _Entrance:
    """Tensors that came from another stage, on this one's device.

    Args:
        leaves: the tensors. Let go when the forward has them, unless it is made again.
        spec: how they are nested.
        differentiable: per leaf, whether its gradient is to go back.
        caught: per leaf, its gradient. Empty before the backward has been there.
    """

    leaves: list[Tensor | None]
    spec: TreeSpec
    differentiable: Sequence[bool]
    caught: list[Tensor | None] = field(default_factory=list)

    def enter(self, token: Tensor, *, with_graph: bool) -> object:
        """The nest, at the beginning of a graph if there is to be one."""
        leaves = self.leaves
        if with_graph and any(self.differentiable):
            entering = (leaf if wanted else None for leaf, wanted in zip(leaves, self.differentiable, strict=True))
            inside = _Boundary.apply(self.caught, token, *entering)  # type: ignore[no-untyped-call]
            leaves = [leaf if entered is None else entered for leaf, entered in zip(leaves, inside, strict=True)]
        return tree_unflatten(leaves, self.spec)

    def gradients(self) -> list[Tensor | None]:
        """Per leaf."""
        return self.caught or [None] * len(self.differentiable)


_Edges = list[GradientEdge | None]
"""Per leaf of a message, where its gradient enters the graph. None where it takes none."""


@dataclass
class _Record:
    """What a micro-batch's backward needs.

    Args:
        entrances: what was taken: the activation, then the skips.
        exits: of the sent values: the activation, then the skips. None if it is to be computed again.
        random: state before the forward, if so.
    """

    entrances: list[_Entrance]
    exits: list[_Edges] | None = None
    random: RandomState | None = None


class Stage:
    """Stage ``index`` of ``stages``: a run of a sequential's layers on a device. ``routes`` are the routes of all
    skips."""

    def __init__(
        self, index: int, stages: int, layers: Sequence[nn.Module], device: torch.device, routes: Sequence[Route]
    ) -> None:
        self.index = index
        self.stages = stages
        self.layers = list(layers)
        self.device = device
        self.stashed = [route for route in routes if route.source == index]
        self.popped = [route for route in routes if route.target == index]
        # The other stage, and the number of the skip: what comes in forward goes back in backward, and the other way.
        self._before = [(index - 1, -1), *((route.source, route.number) for route in self.popped)]
        self._behind = [(index + 1, -1), *((route.target, route.number) for route in self.stashed)]
        modules = dict.fromkeys(module for layer in layers for module in layer.modules())
        self.statistics = MiniBatchStatistics(modules)
        self.token = torch.zeros(0, dtype=torch.float32, requires_grad=True)

    def taken(self, action: Action) -> list[Key]:
        """The messages that an action receives, in order."""
        others = self._before if action.kind == "F" else self._behind
        return [Key(other, self.index, action.batch, skip) for other, skip in others]

    def sent(self, action: Action) -> list[Key]:
        """The messages that an action sends, in order."""
        others = self._behind if action.kind == "F" else self._before
        return [Key(self.index, other, action.batch, skip) for other, skip in others]


class StageStep:
    """A stage in one step. ``stream`` is of its random numbers on the CPU (None: torch's generator)."""

    def __init__(self, stage: Stage, step: Step, port: Mailbox, stream: RandomStream | None = None) -> None:
        self._stage = stage
        self._step = step
        self._port = port
        self._stream = stream
        self._records: dict[int, _Record] = {}
        self.failure: Failure | None = None

    def run(self, actions: Sequence[Action]) -> None:
        """Do all the actions."""
        with self.at_work():
            for action in actions:
                self.do(action)

    def at_work(self) -> AbstractContextManager[None]:
        """The context of the actions, in which batch norms collect their statistics."""
        return self._stage.statistics.collected(lambda: self.failure is None)

    def do(self, action: Action) -> None:
        """Run an action, or tell the others that this stage has failed. Does not raise for a failure.

        Raises:
            BaseException: such as KeyboardInterrupt, after the others have been told.
        """
        keys, device = self._stage.sent(action), self._stage.device
        messages: list[Message] = []
        try:
            if self.failure is None:
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    messages = (self._forward if action.kind == "F" else self._backward)(action)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise
        finally:
            if self.failure is not None:
                messages = [Message(failure=self.failure)] * len(keys)
            for key, message in zip(keys, messages, strict=True):
                self._port.send(key, message)

    def _fail(self, error: BaseException) -> None:
        """Note the first failure. What failed keeps nothing."""
        if self.failure is None:
            text = "".join(traceback.format_exception(error))
            self.failure = Failure(stage=self._stage.index, text=text, error=error)
        self._records.clear()

    def _take(self, keys: Sequence[Key]) -> list[Message]:
        """The messages, unless one has told, be it for a later action, that another stage failed."""
        messages = [self._port.take(key) for key in keys]
        if self._port.failure is not None:
            self.failure = self._port.failure
            raise PipelineError("another stage has failed")
        return messages

    def _forward(self, action: Action) -> list[Message]:
        stage, step, batch = self._stage, self._step, action.batch
        with self._noted(action, "wait"):
            came = self._take(stage.taken(action))
        for route, message in zip(stage.popped, came[1:], strict=True):
            if message.versions and message.versions != versions_of(message.leaves):
                raise changed_in_place(route.key[1])
        with self._noted(action, "compute"):
            record = _Record([self._entrance(message) for message in came])
            if step.with_gradients and batch < step.checkpointed:
                versions = [versions_of(entrance.leaves) for entrance in record.entrances]
                record.random = RandomState(stage.device, self._stream)
                with in_pipeline(checkpointing=True):
                    messages, _ = self._compute(record, batch, with_graph=False)
                if versions != [versions_of(entrance.leaves) for entrance in record.entrances]:
                    raise PipelineError(
                        f"stage {stage.index} changes its input in place, and could not compute its forward again from "
                        "it: set inplace=False in its first layer, or checkpoint='never'"
                    )
            else:
                messages, record.exits = self._compute(record, batch, with_graph=step.with_gradients)
                for entrance in record.entrances:
                    entrance.leaves = []
        if step.with_gradients:
            self._records[batch] = record
        return messages

    def _backward(self, action: Action) -> list[Message]:
        stage, batch = self._stage, action.batch
        keys = stage.taken(action)
        gradients: list[list[Tensor | None] | None] = []
        if stage.index == stage.stages - 1 and self._step.loss is not None:
            keys, gradients = keys[1:], [None]  # the loss has no gradient to wait for
        with self._noted(action, "wait"):
            gradients += [message.on(stage.device) for message in self._take(keys)]
        record = self._records.pop(batch)
        with self._noted(action, "compute"):
            exits = record.exits
            if exits is None:
                assert record.random is not None, "what is computed again kept its random state"
                with record.random.again(), in_pipeline(recomputing=True):
                    exits = self._compute(record, batch, with_graph=True)[1]
            roots: list[GradientEdge] = []
            seeds: list[Tensor | None] = []
            for edges, edge_gradients in zip(exits, gradients, strict=True):
                for place, edge in enumerate(edges):
                    seed = None if edge_gradients is None else edge_gradients[place]
                    if edge is not None and (edge_gradients is None or seed is not None):
                        roots.append(edge)
                        seeds.append(seed)
            record.exits = exits = None
            if roots:
                torch.autograd.backward(roots, seeds)
        return [Message(leaves=entrance.gradients()) for entrance in record.entrances]

    def _entrance(self, message: Message) -> _Entrance:
        assert message.spec is not None, "what goes forward tells how it is nested"
        return _Entrance(message.on(self._stage.device), message.spec, message.differentiable)

    def _compute(self, record: _Record, batch: int, *, with_graph: bool) -> tuple[list[Message], list[_Edges]]:
        """The layers' forward: what leaves the stage, the activation and then the skips."""
        stage, step = self._stage, self._step
        tracker = SkipTracker()
        with step.modes.applied(), torch.set_grad_enabled(with_graph), in_pipeline(micro_batches=step.batches):
            first, *skips = record.entrances
            for route, entrance in zip(stage.popped, skips, strict=True):
                tracker.save(route.key, entrance.enter(stage.token, with_graph=with_graph))
            value = first.enter(stage.token, with_graph=with_graph)
            with self._stream or nullcontext():
                with use_skip_tracker(tracker):
                    for layer in stage.layers:
                        value = layer(value)
                if step.loss is not None and stage.index == stage.stages - 1:
                    value = step.loss(batch, value)
                exits = [self._exit(value, f"the output of stage {stage.index}")]
                del value
                for route in stage.stashed:
                    exits.append(self._exit(tracker.load(route.key), f"the skip {route.key[1]!r}"))
        return [message for message, _ in exits], [edges for _, edges in exits]

    def _exit(self, value: object, what: str) -> tuple[Message, _Edges]:
        leaves, spec = flatten(value, what)
        will = self._step.with_gradients
        # A checkpointed forward cannot tell, so that a gradient is asked for that may be left out.
        asks = [
            leaf is not None
            and will
            and (leaf.requires_grad if torch.is_grad_enabled() else leaf.is_floating_point() or leaf.is_complex())
            for leaf in leaves
        ]
        edges = [get_gradient_edge(leaf) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
        detached = [None if leaf is None else leaf.detach() for leaf in leaves]
        return Message(leaves=detached, spec=spec, differentiable=asks, versions=versions_of(detached)), edges

    def _noted(self, action: Action, what: str) -> AbstractContextManager[None]:
        recorder, stage = self._step.recorder, self._stage
        if recorder is None:
            return nullcontext()
        return recorder.span(stage.index, action, what, stage.device if what == "compute" else None)
