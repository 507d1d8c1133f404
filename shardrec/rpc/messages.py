"""The messages between trainers and servers: tensors and plain data, checked on arrival.

::

    part      (collection, header, words)   one collection's ids for this server, as a payload all-to-all carries
              int, [int], (n,) int32        them (:mod:`shardrec.exchange.payload`), and its row of the header exchange
    answer    (True, value) or (False, name of an error class, its text)

An error travels as text: the exception of a callee would come as a RuntimeError without its class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardrec import errors
from shardrec.errors import BusyError, CheckpointError, ConfigError, InputError, PeerError, ShardrecError
from shardrec.exchange.batch import Batch
from shardrec.exchange.check import ids_are_valid
from shardrec.modules.collection import ShardedCollection

__all__ = ["Answer", "Part", "check_gradient", "check_parts", "failure", "unwrapped"]

Part = tuple[int, list[int], Tensor]
Answer = tuple[bool, Any] | tuple[bool, str, str]

_CLASSES: tuple[type[ShardrecError], ...] = (BusyError, CheckpointError, ConfigError, InputError, PeerError)


def failure(error: BaseException) -> Answer:
    """An error as an answer."""
    for cls in _CLASSES:
        if isinstance(error, cls):
            return False, cls.__name__, str(error)
    return False, "PeerError", f"the server failed: {type(error).__name__}: {error}"


def unwrapped(answer: Any, server: str) -> Any:
    """The value of an answer.

    Raises:
        ShardrecError: what the server answered.
    """
    if isinstance(answer, tuple) and len(answer) == 2 and answer[0] is True:
        return answer[1]
    if isinstance(answer, tuple) and len(answer) == 3 and all(isinstance(field, str) for field in answer[1:]):
        cls = getattr(errors, answer[1]) if answer[1] in errors.__all__ else PeerError
        raise cls(f"{server}: {answer[2]}")
    raise PeerError(f"{server} answered with a {type(answer).__name__}; use one release of shardrec everywhere")


def check_parts(parts: object, collections: Sequence[ShardedCollection]) -> list[Part]:
    """The parts of a request, if a lookup can take them.

    Args:
        parts: as they came.
        collections: of the server.

    Raises:
        InputError: naming what is wrong.
    """
    if not isinstance(parts, list):
        raise InputError(f"a request is a list of parts, not a {type(parts).__name__}; {_SAME}")
    for part in parts:
        if not (isinstance(part, tuple) and len(part) == 3):
            raise InputError(f"a part is (collection, header, words), not a {type(part).__name__}; {_SAME}")
        number, header, words = part
        if type(number) is not int or not 0 <= number < len(collections):
            raise InputError(f"collection {number!r} is asked for and this server has {len(collections)}; {_SAME}")
        _check_part(header, words, collections[number])
    return parts


_SAME = "give servers and trainers the same model, plan and release of shardrec"


def _check_part(header: object, words: object, collection: ShardedCollection) -> None:
    names = ", ".join(map(repr, list(collection.tables())[:5]))
    what = f"the request for tables {names}"
    columns = collection.input.columns
    if not (isinstance(header, list) and len(header) == columns and all(type(n) is int and n >= 0 for n in header)):
        raise InputError(f"{what} has the header {header!r}, not {columns} counts; {_SAME}")
    if not (isinstance(words, Tensor) and words.dtype is torch.int32 and words.dim() == 1):
        raise InputError(f"{what} does not come as a flat int32 tensor; {_SAME}")
    ids = collection.input.payload.lengths_and_ids(words, header)
    if ids is None:
        raise InputError(f"{what} has {words.numel()} words, which do not fit its header {header}; {_SAME}")
    lengths_SB, values = ids
    batch = Batch(keys=(), lengths=lengths_SB, values=values, weights=None)
    if not bool(ids_are_valid(batch, collection.input.shard_rows, unlimited=False)):
        raise InputError(f"{what} has ids outside of their shards, or lengths that do not add up; {_SAME}")


def check_gradient(gradient: object) -> Tensor:
    """The gradients of a request's rows.

    Raises:
        InputError: if it is anything but a flat float32 tensor.
    """
    if isinstance(gradient, Tensor) and gradient.dtype is torch.float32 and gradient.dim() == 1:
        return gradient
    raise InputError(f"a gradient is a flat float32 tensor, and a {type(gradient).__name__} came; {_SAME}")
