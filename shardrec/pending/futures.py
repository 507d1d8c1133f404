"""Futures: values that are computed on another thread, in eager mode by whoever fulfils them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.futures import Future

from shardrec._torchscript import compiles_to

__all__ = ["fork", "join"]

W = TypeVar("W")

# See [Note: whose function this is] in awaits.py.
fork: Callable[..., Future[Any]] = torch.jit.fork


def join(future: Future[W]) -> W:
    """The value of a future: of ``fork``, of an RPC, or made by hand. Also inside TorchScript.

    Blocks until it is there. ``shardrec.wait`` does the same for any pending value, and ``shardrec.as_lazy(future)``
    is a ``LazyAwaitable`` that joins at its first use.

    Raises:
        Exception: what the forked function raised.
    """
    return future.wait()


compiles_to(join, "aten::wait")
