"""Fake kernels for the fbgemm operators of forwards that lack them: shapes and dtypes without values.

Tracers (torch.compile, torch.export) run a program on tensors without data. fbgemm has fake kernels for its permutes
and cuts. Its CPU build lacks them for the operators of table lookups, so that tracing stops there. This module
registers them for the operators of a *forward*: sums of bags, weighted sums, and rows.

[Note: no fakes for fbgemm's backward]
fbgemm's backward operators are declared to update the weights, including those on other devices, for which undefined
tensors are passed. Their result is an undefined tensor. Neither can be traced, and if it could, a compiler that makes
programs functional would copy a whole table to write into the copy. So in a compiled model that trains, lookups run
behind shardrec's operators (:mod:`shardrec.modules.operators`).

Shapes: S slots, B samples, N ids, D columns of all the slots, w columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import fbgemm_gpu  # defines the operators
import fbgemm_gpu.sparse_ops  # noqa: F401  # and fbgemm's own fake kernels
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor


def _pooled(arguments: Mapping[str, Any]) -> Tensor:
    """(B, D) sums of the bags that ``offsets`` (S·B + 1,) bound."""
    slots = arguments["D_offsets"].numel() - 1
    return _like((arguments["offsets"].numel() - 1) // slots, arguments["total_D"], arguments)


def _rows(arguments: Mapping[str, Any]) -> Tensor:
    """(N, w) rows of the ids."""
    return _like(arguments["indices"].numel(), arguments["D"], arguments)


def _like(rows: int, columns: int, arguments: Mapping[str, Any]) -> Tensor:
    dtype: torch.dtype = SparseType.from_int(arguments["output_dtype"]).as_dtype()
    fake: Tensor = arguments["indices"].new_empty((rows, columns), dtype=dtype)
    return fake


FAKES: dict[str, Callable[[Mapping[str, Any]], Tensor]] = {
    "fbgemm::split_embedding_codegen_forward_unweighted_pt2_wrapper": _pooled,
    "fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper": _pooled,
    "fbgemm::split_embedding_nobag_codegen_forward_unweighted_pt2_wrapper": _rows,
}
"""What fbgemm's lookups (``split_embedding_codegen_lookup_*_function_pt2``) call, by argument name."""


def has_fake(name: str) -> bool:
    """Whether the operator ``name`` ("library::operator") already has a fake kernel."""
    if torch._C._dispatch_has_kernel_for_dispatch_key(name, "Meta"):
        return True
    return torch._library.simple_registry.singleton.find(name).fake_impl.kernel is not None


def register_fakes() -> tuple[str, ...]:
    """Register the fake kernels that this build of fbgemm lacks. A second call does nothing.

    Returns:
        The names of the operators registered by this call.
    """
    missing = tuple(name for name in FAKES if _operator(name) is not None and not has_fake(name))
    for name in missing:
        names = [argument.name for argument in _operator(name).default._schema.arguments]
        torch.library.register_fake(name, partial(_called, FAKES[name], names))
    return missing


def _called(fake: Callable[[Mapping[str, Any]], Tensor], names: Sequence[str], *args: Any, **kwargs: Any) -> Tensor:
    return fake({**dict(zip(names, args, strict=False)), **kwargs})


def _operator(name: str) -> Any:
    """The operator. None if this build lacks it."""
    library, operator = name.split("::")
    return getattr(getattr(torch.ops, library), operator, None)
