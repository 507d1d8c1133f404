"""Pickles of plain data between ranks, which are read without running any function that a pickle could name.

An attacker who can write to the ranks' store, or takes a rank's place, can send wrong data, but cannot run code.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import namedtuple
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device
from torch.utils._pytree import SUPPORTED_NODES, TreeSpec, tree_flatten

from shardrec.errors import PeerError, ShardrecError

_BUILTINS = (bool, bytearray, complex, dict, float, frozenset, int, list, set, str, tuple)
_FIRST_BYTES = 1024
"""Bytes of a value that are sent along with its size. Longer ones take a second collective."""


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks, on every rank. Every rank calls it.

    Args:
        value: of the types that :func:`load` reads.
        group: default: the default group.

    Raises:
        PeerError: if a rank sent anything else.
    """
    data = torch.frombuffer(bytearray(dump(value)), dtype=torch.uint8)
    size = torch.tensor([data.numel()]).view(torch.uint8)
    firsts = _gather_rows(torch.cat([size, data[:_FIRST_BYTES]]), len(size) + _FIRST_BYTES, group)
    lengths = firsts[:, : len(size)].contiguous().view(torch.int64).flatten().tolist()
    rows = firsts[:, len(size) :]
    if max(lengths) > _FIRST_BYTES:
        rows = torch.cat([rows, _gather_rows(data[_FIRST_BYTES:], max(lengths) - _FIRST_BYTES, group)], dim=1)
    return [load(row[:length].numpy().tobytes()) for row, length in zip(rows, lengths, strict=True)]


def _gather_rows(data: torch.Tensor, length: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """(W, length) the bytes per rank, on the CPU, with zeros behind them."""
    device = _get_object_coll_device(group)
    padded = torch.zeros(length, dtype=torch.uint8, device=device)
    padded[: data.numel()] = data.to(device)
    rows = padded.new_empty(dist.get_world_size(group), length)
    dist.all_gather(list(rows.unbind()), padded, group=group)
    return rows.cpu()


def dump(value: Any) -> bytes:
    """Pickle a value for :func:`load`."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Read plain values, paths, dtypes, tree specs, enums, named tuples, and shardrec's own data classes and errors.

    Raises:
        PeerError: for anything else.
    """
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    """A pickler with tree specs that can be unpickled without torch's warning about the class of their leaves."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, TreeSpec) and obj.is_leaf():
            return _leaf_spec, ()
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Of loaded modules only, for an import runs code.
        value = super().find_class(module, name) if module in sys.modules else None
        # torch has the function namedtuple as the type of all named tuples. It makes classes of nothing but names.
        if value in (_leaf_spec, namedtuple) or isinstance(value, torch.dtype):
            return value
        if isinstance(value, type) and _is_data(value):
            return value
        raise PeerError(
            f"a rank sent {module}.{name}, which is not plain data: give plain keys and containers to pipeline stages, "
            "and make sure that only the job's ranks can reach their store"
        )


def _is_data(kind: type) -> bool:
    """Whether creating objects of this class is free of side effects."""
    in_package = kind.__module__.startswith("shardrec.")
    return (
        kind in _BUILTINS
        or kind in SUPPORTED_NODES
        or issubclass(kind, (TreeSpec, Enum, PurePath, ShardrecError))
        or (issubclass(kind, tuple) and hasattr(kind, "_fields"))
        or (in_package and hasattr(kind, "__dataclass_fields__"))
    )


def _leaf_spec() -> TreeSpec:
    return tree_flatten(0)[1]
