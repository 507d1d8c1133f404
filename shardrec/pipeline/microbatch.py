"""Cuts a mini-batch into micro-batches, and concatenates them again.

::

    (10, D), chunks=4 ──► (3, D) (3, D) (2, D) (2, D)        (3, D), chunks=4 ──► (1, D) (1, D) (1, D)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten

from shardrec.errors import ConfigError

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def sizes_of(total: int, chunks: int) -> list[int]:
    """Samples per micro-batch: as even as can be, the larger ones first, none empty unless all are.

    Args:
        total: samples B of the mini-batch.
        chunks: micro-batches wanted. There are fewer if B is smaller.
    """
    count = max(1, min(chunks, total))
    small, more = divmod(total, count)
    return [small + (number < more) for number in range(count)]


def batch_size(value: object, what: str = "the input") -> int:
    """Samples B of a nest of (B, ...) tensors.

    Args:
        value: a tensor or a KeyedJaggedTensor, or tuples, lists and dicts of them. None stands for no tensor.
        what: for error messages.

    Raises:
        TypeError: if something in it is neither.
        ConfigError: if the tensors have different sizes, or no tensor is given.
    """
    sizes: dict[str, int] = {}
    for path, leaf in tree_flatten_with_path(value, is_leaf=_is_jagged)[0]:
        if leaf is None:
            continue
        if _is_jagged(leaf):
            if leaf.variable_stride_per_key():
                raise ConfigError(
                    f"{what}{keystr(path)} is a KeyedJaggedTensor with a batch size per key, which cannot be cut into "
                    "micro-batches: pad it"
                )
            sizes[keystr(path)] = leaf.stride()
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{what}{keystr(path)} is a {type(leaf).__name__}: a pipeline takes (B, ...) tensors, and tuples, "
                "lists and dicts of them"
            )
        if leaf.dim() == 0:
            raise ConfigError(f"{what}{keystr(path)} is a tensor without dimensions. Its first has to be the batch")
        sizes[keystr(path)] = leaf.size(0)
    if len(set(sizes.values())) != 1:
        seen = ", ".join(f"{path or 'it'} has {size}" for path, size in sizes.items()) or "it holds no tensor"
        raise ConfigError(f"the tensors of {what} need the same number of samples along dimension 0: {seen}")
    return next(iter(sizes.values()))


def scatter(value: object, sizes: Sequence[int]) -> list[object]:
    """Cut a nest of (B, ...) tensors along dimension 0 into one nest, of views, for each micro-batch.

    A KeyedJaggedTensor is cut by its samples, and its ids are copied.
    """
    leaves, spec = tree_flatten(value, is_leaf=_is_jagged)
    pieces: list[Sequence[object]] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            pieces.append(leaf.split(list(sizes)))
        else:
            pieces.append(_jagged_pieces(leaf, sizes) if _is_jagged(leaf) else [leaf] * len(sizes))
    return [tree_unflatten([piece[number] for piece in pieces], spec) for number in range(len(sizes))]


def _is_jagged(value: object) -> TypeGuard[KeyedJaggedTensor]:
    """Whether it is a KeyedJaggedTensor, which nothing is before its module was imported."""
    module = sys.modules.get("torchrec.sparse.jagged_tensor")
    return module is not None and isinstance(value, module.KeyedJaggedTensor)


def _jagged_pieces(features: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    """KeyedJaggedTensors of ``sizes`` samples each. Their bounds are read on the host."""
    keys, samples = features.keys(), features.stride()
    lengths_FB = features.lengths().view(len(keys), samples)
    bounds = features.offsets().tolist()
    weights = features.weights_or_none()
    pieces, begin = [], 0
    for size in sizes:
        runs = [slice(bounds[row * samples + begin], bounds[row * samples + begin + size]) for row in range(len(keys))]
        pieces.append(
            type(features)(
                keys=keys,
                values=torch.cat([features.values()[run] for run in runs]),
                lengths=lengths_FB[:, begin : begin + size].reshape(-1),
                weights=None if weights is None else torch.cat([weights[run] for run in runs]),
                stride=size,
            )
        )
        begin += size
    return pieces


def gather(values: Sequence[object], what: str = "the output") -> object:
    """Concatenate nests of (b, ...) tensors along dimension 0.

    Raises:
        ConfigError: if a tensor lacks dimensions, or the nests differ.
    """
    flat = [tree_flatten(value) for value in values]
    spec = flat[0][1]
    if any(other != spec for _, other in flat):
        raise ConfigError(
            f"{what} is nested differently for some micro-batches: {', '.join(str(nest) for _, nest in flat)}"
        )
    whole = []
    for leaves in zip(*(leaves for leaves, _ in flat), strict=True):
        if isinstance(leaves[0], Tensor):
            if leaves[0].dim() == 0:
                raise ConfigError(
                    f"{what} holds a tensor without dimensions, which cannot be gathered from {len(values)} "
                    "micro-batches: return one row per sample, or use Pipeline.step with loss_fn"
                )
            whole.append(leaves[0] if len(leaves) == 1 else torch.cat(leaves))
        else:
            whole.append(leaves[0])
    return tree_unflatten(whole, spec)
