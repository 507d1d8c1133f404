"""``shardrec.export``: a sharded model as an ``ExportedProgram`` that takes plain tensors; see serve/program.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.export import ExportedProgram

from shardrec.modules import ShardedModel
from shardrec.serve.example import example_of
from shardrec.serve.program import program_of, served

__all__ = ["export"]


def export(
    model: ShardedModel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static: Sequence[str] = (),
) -> ExportedProgram:
    """Export a model for inference with ``torch.export`` (non-strict), on one rank or several.

    The program takes the arguments of :func:`shardrec.serve.from_tensors`'s entry, in that order: ``values`` (N,),
    ``lengths`` (F·B,), ``weights`` (N,) for weighted collections, and the other tensors of the model's ``forward``. B
    and N may be any numbers and may differ by rank. ``torch.export.save`` and ``load`` work on it; a process that runs
    it imports torch and fbgemm_gpu. On several ranks each rank exports its own program, and all ranks run theirs
    together, in a process group of the same name as the model's (a process's first group always has the same name).

    An id outside its table, or lengths that do not fit the ids, raises RuntimeError on all ranks, "bad input: rank 1:
    ...". So do tensors of other dtypes than the example's, and sizes that do not fit each other.

    Args:
        model: sharded, or made by :func:`shardrec.serve.quantize`; in eval mode. Tables that are not quantized are
            copied into float32 tables of fbgemm's inference kernel; this is collective.
        args: positional arguments of an example call; only dtypes, sizes and keys are read, so any batch will do.
        kwargs: keyword arguments of the example call.
        static: names of tensors whose size never changes; of other tensors the first dimension is the samples.

    Returns:
        The program; call ``program.module()``.

    Raises:
        ConfigError: if the model is in training mode, or if the example does not fit it.
        ExportError: if the model's code cannot be traced.
        ScriptError: for a module whose scripted twin breaks its protocol.
    """
    return program_of(example_of(served(model), args, kwargs, static=static))
