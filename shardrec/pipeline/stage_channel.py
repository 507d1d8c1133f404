"""Messages between the ranks of a pipeline. Each rank is a stage.

::

    stage ──send──► a thread per peer ──── process group ────► a thread per peer ──► mailbox ──take──► stage

A message is received as soon as it arrives, while the stage computes, and a send waits for no other peer. The message's
header (``exchange/safe_pickle.py``, over gloo) gives shapes and dtypes, so micro-batches may differ. Over NCCL, forward
and backward each have a communicator: between two ranks, its messages then go in one direction only, in the order of
both ranks' schedules.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.errors import PeerError
from shardrec.exchange import safe_pickle
from shardrec.exchange.subgroups import subgroup
from shardrec.pipeline.message import Key, Mailbox, Message
from shardrec.pipeline.timeline import Recorder

T = TypeVar("T")

_FRAME = 1024
"""Bytes of a header's first part. Most headers have only one part."""


class Peers:
    """The other ranks of a pipeline. What waits for them raises PeerError if one is gone.

    Args:
        group: stage s is on its rank s. All of its ranks call this.
        device: of this rank's stage.

    Attributes:
        sent_bytes: bytes of tensors sent so far, by the stage that they were sent to.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.sent_bytes: Counter[int] = Counter()
        self._ranks = [dist.get_global_rank(group, rank) for rank in range(self.size)]
        new_group = partial(subgroup, group, range(self.size), device, what="start of the pipeline")
        self._control = new_group(backend="gloo")
        self._tensors = (
            [new_group(backend="nccl"), new_group(backend="nccl")] if device.type == "cuda" else [self._control] * 2
        )
        self._threads: dict[tuple[str, int], ThreadPoolExecutor] = {}

    def gather(self, value: T) -> list[T]:
        """The value per rank, on every rank, which all call this. Over gloo, so that no device waits."""
        with self._about_stages():
            return safe_pickle.gather(value, self._control)

    def broadcast(self, value: Tensor, stage: int) -> None:
        """Overwrite ``value`` on every rank with the value of a stage."""
        with self._about_stages():
            dist.broadcast(value, self._ranks[stage], group=self._tensors[0])

    def submit(self, way: str, peer: int, work: Callable[[], None]) -> Future[None]:
        """Do it on the thread for a peer. One at a time, in order."""
        threads = self._threads.get((way, peer))
        if threads is None:
            name = f"pipeline {way} {peer}"
            threads = self._threads[way, peer] = ThreadPoolExecutor(1, thread_name_prefix=name)
        return threads.submit(work)

    def send(self, key: Key, message: Message, ready: torch.cuda.Event | None) -> None:
        """Send a message. Waits until it is gone. ``ready`` is recorded when its tensors had been computed."""
        shapes = [None if leaf is None else (tuple(leaf.shape), leaf.dtype) for leaf in message.leaves]
        failure = None if message.failure is None else message.failure.told()
        head = safe_pickle.dump((tuple(key), shapes, message.spec, list(message.differentiable), failure))
        data = len(head).to_bytes(8, "little") + head
        to = self._ranks[key.target]
        group = self._tensors[key.source > key.target]
        with self._about_stages(), ExitStack() as stack:
            dist.send(_bytes(data[:_FRAME].ljust(_FRAME, b"\0")), to, group=self._control)
            if len(data) > _FRAME:
                dist.send(_bytes(data[_FRAME:]), to, group=self._control)
            if ready is not None:
                stream = stack.enter_context(_side_stream(self.device))
                stream.wait_event(ready)
            for leaf in message.leaves:
                if leaf is not None and leaf.numel():
                    if ready is not None:
                        leaf.record_stream(torch.cuda.current_stream(self.device))
                    dist.send(leaf.contiguous(), to, group=group)
                    self.sent_bytes[key.target] += leaf.nbytes

    def receive(self, key: Key) -> Message:
        """Receive the next message of a peer, which is ``key``."""
        source = self._ranks[key.source]
        group = self._tensors[key.source > key.target]
        with self._about_stages(), ExitStack() as stack:
            frame = torch.empty(_FRAME, dtype=torch.uint8)
            dist.recv(frame, source, group=self._control)
            data = bytes(frame.tolist())
            length = int.from_bytes(data[:8], "little") + 8
            if length > _FRAME:
                rest = torch.empty(length - _FRAME, dtype=torch.uint8)
                dist.recv(rest, source, group=self._control)
                data += bytes(rest.tolist())
            name, shapes, spec, differentiable, failure = safe_pickle.load(data[8:length])
            assert Key(*name) == key, f"{Key(*name)} came instead of {key}: both sides have one schedule"
            leaves: list[Tensor | None] = []
            event = None
            stream = stack.enter_context(_side_stream(self.device)) if self.device.type == "cuda" else None
            for shape in shapes:
                leaf = None if shape is None else torch.empty(shape[0], dtype=shape[1], device=self.device)
                if leaf is not None and leaf.numel():
                    dist.recv(leaf, source, group=group)
                leaves.append(leaf)
            if stream is not None:
                event = stream.record_event()
        return Message(leaves=leaves, spec=spec, differentiable=differentiable, failure=failure, ready=event)

    @contextmanager
    def _about_stages(self) -> Iterator[None]:
        """A backend's error inside the block becomes an error that explains it."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"stage {self.rank} of {self.size}: another stage's rank stopped, or did not come within the process "
                f"group's timeout: {str(error).splitlines()[0]}. Look for the first error among the other ranks' "
                "messages, and start all the ranks again"
            ) from error


class PeerPort(Mailbox):
    """The mailbox of a stage that is alone in its process, in one step.

    Args:
        peers: the other ranks.
        expected: what will come from them, in order.
        recorder: of the timeline.
    """

    def __init__(self, peers: Peers, expected: Iterable[Key], recorder: Recorder | None) -> None:
        super().__init__()
        self._peers = peers
        self._recorder = recorder
        by_source: dict[int, list[Key]] = {}
        for key in expected:
            if 0 <= key.source < peers.size:
                by_source.setdefault(key.source, []).append(key)
        self._under_way = [
            peers.submit("receive", source, partial(self._receive, keys)) for source, keys in by_source.items()
        ]

    def send(self, key: Key, message: Message) -> None:
        """To another rank, or to the caller."""
        if not 0 <= key.target < self._peers.size or key.target == self._peers.rank:
            super().send(key, message)
            return
        ready = (
            torch.cuda.current_stream(self._peers.device).record_event() if self._peers.device.type == "cuda" else None
        )
        self._under_way.append(self._peers.submit("send", key.target, partial(self._send, key, message, ready)))

    def finish(self) -> None:
        """Wait until all is sent and received.

        Raises:
            PeerError: if another rank is gone.
        """
        errors = [error for error in (future.exception() for future in self._under_way) if error is not None]
        self._under_way.clear()
        if errors:
            raise errors[0]

    def _send(self, key: Key, message: Message, ready: torch.cuda.Event | None) -> None:
        if self._recorder is None:
            self._peers.send(key, message, ready)
            return
        name = f"{'F' if key.source < key.target else 'B'}{key.batch} to {key.target}"
        with self._recorder.span(key.source, name if key.skip < 0 else f"{name}, skip", "send"):
            self._peers.send(key, message, ready)

    def _receive(self, keys: Sequence[Key]) -> None:
        try:
            for key in keys:
                super().send(key, self._peers.receive(key))
        except BaseException as error:
            self.give_up(error)
            raise


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class _ThreadStream(threading.local):
    stream: torch.cuda.Stream | None = None


_thread_stream = _ThreadStream()


@contextmanager
def _side_stream(device: torch.device) -> Iterator[torch.cuda.Stream]:
    """Issue on a stream of the thread's own."""
    if _thread_stream.stream is None:
        _thread_stream.stream = torch.cuda.Stream(device)
    with torch.cuda.stream(_thread_stream.stream):
        yield _thread_stream.stream
