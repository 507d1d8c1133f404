"""The messages between stages, and the mailbox in which they wait.

A stage that fails sends its failure instead of all its remaining messages. So every expected message arrives, every
stage ends its step, and no message is left over for the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map

from shardrec.pending import wait


class Key(NamedTuple):
    """Names a message within a step.

    Args:
        source: the stage that sends it; -1 the caller, for the first stage.
        target: the stage that it is for. The number of stages for the caller, behind the last.
        batch: number of the micro-batch.
        skip: number of the skip; -1 for activations. From a later stage to an earlier one go gradients.
    """

    source: int
    target: int
    batch: int
    skip: int = -1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The failure that ended a stage's step.

    Args:
        stage: its number.
        text: the traceback.
        error: the exception, in the process where it was raised.
    """

    stage: int
    text: str
    error: BaseException | None = None

    def told(self) -> Failure:
        """The failure as it is sent to other processes."""
        return Failure(stage=self.stage, text=self.text)


@dataclass(frozen=True, kw_only=True)
class Message:
    """A nested structure of tensors that is sent between stages.

    Args:
        leaves: its tensors. None for no tensor (in a gradient: for a zero).
        spec: how they are nested. None in a gradient, where the receiver knows.
        differentiable: per leaf, whether a gradient is expected.
        versions: per leaf, how often it had been changed in place. Empty if the receiver has a copy.
        failure: replaces the other fields.
        ready: on CUDA, an event recorded when the tensors had arrived.
    """

    leaves: Sequence[Tensor | None] = ()
    spec: TreeSpec | None = None
    differentiable: Sequence[bool] = ()
    versions: Sequence[int] = ()
    failure: Failure | None = None
    ready: torch.cuda.Event | None = None

    def on(self, device: torch.device) -> list[Tensor | None]:
        """The tensors on a device."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self.ready)
            for leaf in self.leaves:
                if leaf is not None:
                    leaf.record_stream(stream)
        gpu = device.type == "cuda"
        return [None if leaf is None else leaf.to(device, non_blocking=gpu) for leaf in self.leaves]


def flatten(value: object, what: str) -> tuple[list[Tensor | None], TreeSpec]:
    """The tensors of a nest, pending ones waited for.

    Args:
        value: tensors, None and awaitables in tuples, lists, dicts and other pytrees.
        what: for error messages.

    Raises:
        TypeError: if something else is in it.
    """
    leaves, spec = tree_flatten(tree_map(wait, value))
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, Tensor):
            raise TypeError(
                f"{what} holds a {type(leaf).__name__}: between stages go tensors, None, and tuples, lists and dicts "
                "of them"
            )
    return leaves, spec


class Mailbox:
    """How messages travel in one step: between threads, for stages in one process.

    Attributes:
        failure: the first failure that a message reported.
    """

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self._messages: dict[Key, Message] = {}
        self._changed = threading.Condition()
        self._broken: BaseException | None = None

    def send(self, key: Key, message: Message) -> None:
        """Put a message in. Does not wait."""
        with self._changed:
            self.failure = self.failure or message.failure
            self._messages[key] = message
            self._changed.notify_all()

    def take(self, key: Key) -> Message:
        """Take it out, when it has come.

        Raises:
            BaseException: what :meth:`give_up` was told.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._messages or self._broken is not None)
            if key not in self._messages:
                assert self._broken is not None, "waiting ends with a message or without hope"
                raise self._broken
            return self._messages.pop(key)

    def finish(self) -> None:
        """Wait until all messages to and from other processes have arrived."""

    def give_up(self, error: BaseException) -> None:
        """Report that no further message will arrive."""
        with self._changed:
            self._broken = error
            self._changed.notify_all()
