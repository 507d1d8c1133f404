"""Functions that run under ``async_execution``, by the name of their module, as RPC finds them."""

from __future__ import annotations

import threading

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

import shardrec
from shardrec.rpc import EmbeddingServer

__all__ = [
    "Forms",
    "by_hand",
    "by_then",
    "fails",
    "fails_by_hand",
    "make_server",
    "no_future",
    "over_another",
    "scripted",
    "scripted_caller",
]


def _later(x: Tensor, by: float = 1.0) -> Future[Tensor]:
    """Completed by another thread."""
    future: Future[Tensor] = Future()
    threading.Timer(0.01, lambda: future.set_result(x + by)).start()
    return future


@async_execution
def by_hand(x: Tensor) -> Future[Tensor]:
    return _later(x)


@async_execution
def by_then(x: Tensor) -> Future[Tensor]:
    return _later(x, 0.5).then(lambda one: one.value() + 0.5)


@async_execution
def over_another(to: str, x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, by_hand, args=(x,)).then(lambda one: one.value() + 1)


@async_execution
def fails(x: Tensor) -> Future[Tensor]:
    raise ValueError("the row is not here")


@async_execution
def fails_by_hand(x: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    threading.Timer(0.01, lambda: future.set_result(x)).start()

    def fail(one: Future[Tensor]) -> Tensor:
        raise ValueError("the row is not there")

    # Not set_exception: the caller would get the exception as the value, for only this process's Future raises it.
    return future.then(fail)


@async_execution
def no_future(x: Tensor) -> int:
    return 3


class Forms:
    def __init__(self, by: float) -> None:
        self.by = by

    @staticmethod
    @async_execution
    def static(x: Tensor) -> Future[Tensor]:
        return _later(x)

    @classmethod
    @async_execution
    def of_class(cls, x: Tensor) -> Future[Tensor]:
        return _later(x)

    @async_execution
    def bound(self, x: Tensor) -> Future[Tensor]:
        return _later(x, self.by)


def make_server() -> EmbeddingServer:
    from tests.rpc.jobs import make_model, make_plan

    return EmbeddingServer(make_model("sgd"), make_plan(), 0)


@torch.jit.script
def _add_two(x: Tensor) -> Tensor:
    return x + 2


@async_execution
@torch.jit.script
def scripted(to: str, x: Tensor) -> Future[Tensor]:
    return rpc.rpc_async(to, _add_two, (x,))


@torch.jit.script
def scripted_caller(to: str, other: str, x: Tensor) -> Tensor:
    one = rpc.rpc_async(to, _add_two, (x,))
    two = rpc.rpc_async(other, _add_two, (x,))
    return shardrec.pending.join(one) + shardrec.pending.join(two)
