"""An entry as an ``ExportedProgram``: a graph of operators of torch, fbgemm and _c10d_functional.

::

    sharded model ── quantize.py ─────────► tables in fbgemm's inference kernels, if they are not yet
                  ── example.py ──────────► an entry that takes plain tensors, and sizes that stand for all sizes
                  ── scripting/twins.py ──► the model's tree, with the operators-only twins in it
                  ── torch.export ────────► the graph

[Note: inference kernels]
fbgemm's training lookups are registered for autograd only, and take weights and optimizer states that they may modify;
a graph would have to carry all of these. The inference kernel is one operator over one tensor of bytes, which every
executor supports. With float32 rows it returns the same rows, and it also sums in float32.

[Note: no size is special]
A tracer specializes on sizes 0 and 1 (they broadcast), so its program may be wrong for them. Here a batch may have one
sample, no sample or no ids; so tracing runs with ``backed_size_oblivious``, which makes a branch on such a size an
error. The exception is ``size == 0``, which it assumes to be false without a guard. So on one rank the program is
compared with the model on empty batches before it is returned.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardrec._torchscript import plain
from shardrec.errors import ConfigError, ShardrecError
from shardrec.modules import ShardedModel
from shardrec.modules.sharded_model import require_sharded
from shardrec.scripting.twins import scriptable_copy
from shardrec.serve.example import Example
from shardrec.serve.quantize import quantize
from shardrec.serve.served_model import ServedModel

__all__ = ["ExportError", "program_of", "served"]

# torch adds this module's functions at run time, where no type checker sees them.
_SIZES: Any = import_module("torch.fx.experimental._config")


class ExportError(ShardrecError, RuntimeError):
    """A model that ``torch.export`` or AOTInductor refuses; the message has the reason."""


def served(model: ShardedModel) -> ServedModel:
    """Return the model itself if its tables are in inference kernels, else a copy with float32 tables.

    Raises:
        ConfigError: if the model is not sharded, or is in training mode.
    """
    require_sharded(model, "exporting")
    if model.training:
        raise ConfigError(
            f"{type(model).__name__} is in training mode, and an exported model does not train: call model.eval() first"
        )
    return model if isinstance(model, ServedModel) else quantize(model, "fp32")


def program_of(example: Example) -> ExportedProgram:
    """Trace an entry with the example's tensors.

    Raises:
        ExportError: if the model's code cannot be traced.
    """
    # Scriptable twins wrap some values with their TorchScript types; tracing needs the plain values.
    copy = plain(scriptable_copy(example.entry, portable=True))
    with torch.no_grad(), _SIZES.patch(backed_size_oblivious=True):
        try:
            program = torch.export.export(
                copy, example.tensors(), dynamic_shapes=example.dynamic_shapes(), strict=False
            )
        except Exception as error:  # its class depends on what the tracer refuses
            raise _explain(example.entry.model, error) from error
    # Unused nodes include splits into zero parts, which torch.export.load cannot read.
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    model = example.entry.model
    if isinstance(model, ShardedModel) and model.context.collectives.world_size == 1:
        _compare_empty(example, program)
    return program


def _compare_empty(example: Example, program: ExportedProgram) -> None:
    """Raise ExportError if the program and the model differ on a batch without ids, or without samples."""
    for samples in (0, 1):
        tensors = example.tensors(samples, ids=0)
        try:
            expected = pytree.tree_leaves(example.entry(*tensors))
        except Exception:  # the model itself does not take such a batch
            continue
        if not all(isinstance(tensor, torch.Tensor) for tensor in expected):
            return  # such as a KeyedTensor, which may be pending
        try:
            answers = pytree.tree_leaves(program.module()(*tensors))
            torch.testing.assert_close(answers, expected, equal_nan=True, rtol=1e-3, atol=1e-5)
        except Exception as error:  # the program differs or raises
            name = type(getattr(example.entry.model, "module", example.entry.model)).__name__
            raise ExportError(
                f"{name} cannot be exported: for a batch of {samples} samples and no ids, its code does something else "
                "than for other batches, which a traced program cannot: write the branch with torch.where or "
                f"torch.cond. Here is the difference: {error}"
            ) from error


def _explain(model: nn.Module, error: Exception) -> ExportError:
    name = type(getattr(model, "module", model)).__name__
    text = str(error).strip() or type(error).__name__
    return ExportError(
        f"{name} cannot be exported: {text.splitlines()[0]}. A branch or a size that depends on the values of tensors, "
        "or on the number of samples, cannot be traced: write it with torch.where, torch.cond or torch._check; and "
        f"shardrec.wait(value) instead of value.wait(). It was said by {type(error).__name__}:\n{text}"
    )
