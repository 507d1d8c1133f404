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

    The program takes what the entry of :func:`shardrec.serve.from_tensors` takes, in that order: ``values`` (N,),
    ``lengths`` (F·B,), ``weights`` (N,) of weighted collections, and the other tensors of the model's ``forward``. B
    and N are any numbers, on each rank its own. ``torch.export.save`` and ``load`` work on it; a process that runs it
    imports torch and fbgemm_gpu. On several ranks each exports its own program, and all run theirs together, in a
    process group of the name that the model's had (the first group of a process has the same name everywhere).

    An id outside its table, or lengths that do not fit the ids, is a RuntimeError on all ranks, "bad input: rank 1:
    ...". Tensors of other dtypes than the example's are refused as well, and sizes that do not fit each other.

    Args:
        model: sharded, or made by :func:`shardrec.serve.quantize`; in eval mode. Tables that are not quantized become
            float32 tables of fbgemm's inference kernel, a copy; collective where that is so.
        args: an example call's arguments: only dtypes, sizes and keys are looked at, so any batch will do.
        kwargs: those by name.
        static: names of tensors that have the same size in each call; of others, the first dimension is the samples.

    Returns:
        The program. ``program.module()`` is what to call.

    Raises:
        ConfigError: if the model is in training mode, or if the example does not fit it.
        ExportError: if the model's code cannot be traced.
        ScriptError: for a module whose scripted twin breaks its protocol.
    """
    return program_of(example_of(served(model), args, kwargs, static=static))
