"""The exporter: a sharded model frozen for inference, behind a ``forward`` of plain tensors.

::

    sharded model ── entry.py ───────────────► an entry that takes plain tensors ── shardrec.script ──► TorchScript
                  ── quantize.py ────────────► tables in fbgemm's inference kernels, if they are not yet
                  ── example.py ─────────────► an entry, and sizes that stand for all sizes
                  ── scripting/twins.py ─────► the model's tree, with the operators-only twins in it
                  ── torch.export ───────────► a graph of operators of torch, fbgemm and _c10d_functional
                  ── AOTInductor ────────────► machine code

:func:`export` returns the graph; :func:`save` and :func:`package` write the first and the last to files, by the table
:data:`FORMATS`. A file of machine code is for the processor (or the GPU) that it was compiled on. It has the weights,
and calls of fbgemm's operators by name. All of them run with torch and fbgemm's operators, without shardrec.

[Note: inference kernels]
fbgemm's training lookups are registered for autograd only, and take weights and optimizer states that they may modify.
A graph would have to carry all of these. The inference kernel is one operator over one tensor of bytes, which every
executor supports. With float32 rows it returns the same rows, and it also sums in float32.

[Note: no size is special]
A tracer specializes on sizes 0 and 1 (they broadcast), so its program may be wrong for them. Here a batch may have one
sample, no sample or no ids; so tracing runs with ``backed_size_oblivious``, which makes a branch on such a size an
error. The exception is ``size == 0``, which it assumes to be false without a guard. So on one rank the program is
compared with the model on empty batches before it is returned.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._config_module import ConfigModule

from shardrec._torchscript import plain, quiet
from shardrec.errors import ConfigError, ShardrecError
from shardrec.files import os_fault, replacing
from shardrec.modules import ShardedModel
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.sharded_model import require_sharded
from shardrec.scripting.script import compiled
from shardrec.scripting.twins import scriptable_copy
from shardrec.serve.entry import Entry, Features, from_tensors
from shardrec.serve.example import Example, example_of
from shardrec.serve.quantize import quantize
from shardrec.serve.served_model import ServedModel

NOTES = "shardrec.json"
"""Name of the file inside the saved one that describes the model's inputs."""


class ExportError(ShardrecError, RuntimeError):
    """A model that ``torch.export`` or AOTInductor refuses. The message has the reason."""


class _Format(NamedTuple):
    """What a model can be frozen into.

    Args:
        training: what would be wrong with it, of a model in training mode.
        suffix: of a file's name, by which loaders know it; "" for any.
        each_rank: whether each of several ranks has its own; else one process has the whole model.
    """

    training: str
    suffix: str
    each_rank: bool


FORMATS = {
    "script": _Format(training="its file would update tables", suffix="", each_rank=True),
    "program": _Format(training="an exported model does not train", suffix="", each_rank=True),
    "aoti": _Format(training="an exported model does not train", suffix=".pt2", each_rank=False),
}
"""TorchScript files, exported programs, and AOTInductor's packages."""


def save(model: nn.Module, path: str | os.PathLike[str], *, features: Features) -> Path:
    """Save a model for inference, as TorchScript with an entry that takes plain tensors.

    The file's ``forward`` takes the arguments of :func:`shardrec.serve.from_tensors`'s entry. Besides the model the
    file holds ``shardrec.json``: ``features``, ``inputs`` (the names of the arguments, in order), ``formats`` (of the
    quantized tables), ``rank``, ``world_size`` and ``group`` (the name of the process group that a program with several
    ranks must register); of a model of ``quantize`` on one rank also ``published``, for programs that follow a
    :class:`shardrec.Publisher` (:func:`shardrec.serve.published.places_in`). Loading needs torch and fbgemm's
    operators: ``import fbgemm_gpu``, or in C++ its libraries.

    Args:
        model: a sharded model, one made by :func:`shardrec.serve.quantize`, or a module that holds one of these; in
            eval mode.
        path: path of the file. On several ranks each rank saves its own file, and ``{rank}`` in the path is replaced
            by the rank.
        features: the keys of the KeyedJaggedTensor, in the order of the lengths; by parameter if there are several.

    Returns:
        The path of this rank's file. If this raises, a file that existed before is unchanged.

    Raises:
        ConfigError: if the model holds no sharded model, if it is in training mode, if several ranks would write one
            file, or if its ``forward`` cannot be called with plain tensors.
        ScriptError: if TorchScript refuses the model's code.
    """
    _check_infers(model, "script")
    children = [child for child in model.modules() if isinstance(child, ShardedModel)]
    if len(children) != 1:
        raise ConfigError(
            f"{type(model).__name__} holds {len(children)} sharded models, not one: shard the model that it calls, or "
            "all of it, with shardrec.shard"
        )
    (sharded,) = children
    target = _target(path, sharded, "script")
    entry = from_tensors(model, features)
    on_one_rank = sharded.context.collectives.world_size == 1
    scripted = compiled(entry, portable=True, overlap=not on_one_rank)
    notes = _notes(entry, sharded)
    if isinstance(sharded, ServedModel) and on_one_rank:
        from shardrec.serve.published import places_in  # with all of shardrec.checkpoint

        notes["published"] = places_in(scripted, sharded, sharded.formats)
    with replacing(target) as beside:
        try:
            beside.touch()
        except OSError as error:
            raise ConfigError(f"{os_fault(error)}. Give a file in a folder that can be written to") from error
        with quiet():
            torch.jit.save(scripted, str(beside), _extra_files={NOTES: json.dumps(notes)})
    return target


def export(
    model: ShardedModel,
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    static: Sequence[str] = (),
) -> ExportedProgram:
    """Export a model for inference with ``torch.export`` (non-strict), on one rank or several.

    The program takes the arguments of :func:`shardrec.serve.from_tensors`'s entry, in that order: ``values`` (N,),
    ``lengths`` (F·B,), ``weights`` (N,) for weighted collections, and the other tensors of the model's ``forward``. B
    and N may be any numbers and may differ by rank. ``torch.export.save`` and ``load`` work on it. A process that runs
    it imports torch and fbgemm_gpu. On several ranks each rank exports its own program, and all ranks run theirs
    together, in a process group of the same name as the model's (a process's first group always has the same name).

    An id outside its table, or lengths that do not fit the ids, raises RuntimeError on all ranks, "bad input: rank 1:
    ...". So do tensors of other dtypes than the example's, and sizes that do not fit each other.

    Args:
        model: sharded, or made by :func:`shardrec.serve.quantize`; in eval mode. Tables that are not quantized are
            copied into float32 tables of fbgemm's inference kernel. This is collective.
        args: positional arguments of an example call. Only dtypes, sizes and keys are read, so any batch will do.
        kwargs: keyword arguments of the example call.
        static: names of tensors with a fixed size. The first dimension of other tensors is the samples.

    Returns:
        The program. Call ``program.module()``.

    Raises:
        ConfigError: if the model is in training mode, or if the example does not fit it.
        ExportError: if the model's code cannot be traced.
        ScriptError: for a module with a scripted twin that breaks its protocol.
    """
    _check_exports(model, "program")
    served = _served(model)
    return program_of(example_of(served, args, kwargs, static=static), served)


def package(
    model: ShardedModel,
    path: str | os.PathLike[str],
    args: Sequence[object],
    kwargs: Mapping[str, object] | None = None,
    *,
    static: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
) -> Path:
    """Compile a one-rank model for inference, with AOTInductor.

    The package takes any batch size and any number of ids. Bad input raises, as in eager mode. The machine code is for
    the kind of processor that it was compiled on, and the loops that AOTInductor generates run on one thread (fbgemm's
    operators and matrix products on torch's threads). ``torch._inductor.aoti_load_package`` and
    ``torch::inductor::AOTIModelPackageLoader`` load the file; :func:`load_package` checks the inputs as well.

    Args:
        model: a model sharded over one rank, or made from one by :func:`shardrec.serve.quantize`; in eval mode. Tables
            that are not quantized are packaged in float32.
        path: path of the file. It ends in ``.pt2``.
        args: positional arguments of an example call. Only dtypes, sizes and keys are read.
        kwargs: keyword arguments of the example call.
        static: names of tensors with a fixed size. The first dimension of other tensors is the samples.
        options: further settings of AOTInductor, as in ``torch._inductor.config``.

    Returns:
        The path. If this raises, a file that existed before is unchanged.

    Raises:
        ConfigError: if the model is in training mode or on several ranks, if the example does not fit it, if its output
            holds anything but tensors, dicts, lists and tuples, or if there is no C++ compiler.
        ExportError: if the model cannot be traced or compiled.
    """
    # These imports take a second, which programs that only load or quantize do not need.
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InvalidCxxCompiler

    _check_exports(model, "aoti")
    target = _target(path, model, "aoti")
    served = _served(model)
    example = example_of(served, args, kwargs, static=static)
    program = program_of(example, served)
    called = {"tensors": [spec.note() for spec in example.specs], "output": _output_of(program, served)}
    settings = {
        # One thread for the loops that AOTInductor generates: they take a small part of the time.
        "cpp.threads": 1,
        # Tables are memory-mapped from the file instead of passing through the assembler.
        "aot_inductor.force_mmap_weights": True,
        "aot_inductor.metadata": {NOTES: json.dumps(_notes(example.entry, served) | called)},
        **(options or {}),
    }
    try:
        # Written under the final name, which the file also contains, and moved at the end, so that no process loads an
        # incomplete file.
        with torch.no_grad(), tempfile.TemporaryDirectory(prefix=f".{target.stem}.", dir=target.parent) as folder:
            inside = str(Path(folder, target.name))
            Path(aoti_compile_and_package(program, package_path=inside, inductor_configs=settings)).replace(target)
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "AOTInductor found no C++ compiler: install one (on Debian and Ubuntu: apt-get install g++), or name it in "
            f"the environment variable CXX. It said: {error}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # its class depends on the compiler pass that fails
        raise ExportError(f"AOTInductor cannot compile {type(served.module).__name__}: {error}") from error
    return target


def _check_infers(model: nn.Module, form: str) -> None:
    if model.training:
        raise ConfigError(
            f"{type(model).__name__} is in training mode, and {FORMATS[form].training}: call model.eval() first"
        )


def _check_exports(model: ShardedModel, form: str) -> None:
    require_sharded(model, "exporting")
    _check_infers(model, form)


def _served(model: ShardedModel) -> ServedModel:
    """The model itself if its tables are in inference kernels, else a copy with float32 tables."""
    return model if isinstance(model, ServedModel) else quantize(model, "fp32")


def _target(path: str | os.PathLike[str], model: ShardedModel, form: str) -> Path:
    """This rank's file."""
    target, collectives = Path(path), model.context.collectives
    _, suffix, each_rank = FORMATS[form]
    if suffix and target.suffix != suffix:
        raise ConfigError(
            f"a package is named *{suffix}, which is how loaders know it, and not {target.name}: rename it"
        )
    if not each_rank:
        if collectives.world_size > 1:
            raise ConfigError(
                f"the model is sharded over {collectives.world_size} ranks, and a package is run by one process: shard "
                "it over one rank, or use shardrec.serve.save or shardrec.export, which keep the exchanges"
            )
        return target
    if collectives.world_size > 1 and "{rank}" not in str(path):
        raise ConfigError(f"{collectives.world_size} ranks would all write {path}: put {{rank}} into its name")
    # Not str.format, which would also replace other braces in the path.
    return Path(str(path).replace("{rank}", str(collectives.rank)))


def _notes(entry: Entry, model: ShardedModel) -> dict[str, object]:
    """The description of a model's entry for its callers, as JSON values."""
    collectives = model.context.collectives
    groups = [child.group for child in model.module.modules() if isinstance(child, ShardedCollection)]
    formats = model.formats if isinstance(model, ServedModel) else {}
    return {
        "features": entry.features,
        "inputs": list(entry.inputs),
        "formats": {name: form.value for name, form in formats.items()},
        "rank": collectives.rank,
        "world_size": collectives.world_size,
        "group": next((group.group_name for group in groups if group is not None), ""),
    }


def _output_of(program: ExportedProgram, model: ShardedModel) -> object:
    """What a program returns, with the tensors' numbers in their places, as JSON values."""
    spec = program.call_spec.out_spec
    assert spec is not None, "an exported program has outputs"
    output = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if not _is_plain(output):
        raise ConfigError(
            f"{type(model.module).__name__} returns {type(output).__name__}, or something else than a tensor in it. "
            "A package returns tensors, and dicts (by strings), lists and tuples of them: return such, for example "
            "KeyedTensor.values()"
        )
    return output


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    # Named tuples are refused, since JSON would lose their names.
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    return type(value) is int


def program_of(example: Example, model: ServedModel) -> ExportedProgram:
    """Trace an entry of a model with the example's tensors.

    Raises:
        ExportError: if the model's code cannot be traced.
    """
    # torch makes this module a table of settings at run time, where no type checker sees it.
    sizes = import_module("torch.fx.experimental._config")
    assert isinstance(sizes, ConfigModule)
    # Scriptable twins wrap some values with their TorchScript types. Tracing needs the plain values.
    copy = plain(scriptable_copy(example.entry, portable=True))
    with torch.no_grad(), sizes.patch({"backed_size_oblivious": True}):
        try:
            program = torch.export.export(
                copy, example.tensors(), dynamic_shapes=example.dynamic_shapes(), strict=False
            )
        except Exception as error:  # its class depends on what the tracer refuses
            text = str(error).strip() or type(error).__name__
            raise ExportError(
                f"{type(model.module).__name__} cannot be exported: {text.splitlines()[0]}. A branch or a size that "
                "depends on the values of tensors, or on the number of samples, cannot be traced: write it with "
                "torch.where, torch.cond or torch._check; and shardrec.wait(value) instead of value.wait(). It was "
                f"said by {type(error).__name__}:\n{text}"
            ) from error
    # Unused nodes include splits into zero parts, which torch.export.load cannot read.
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()
    if model.context.collectives.world_size == 1:
        _compare_empty(example, program, type(model.module).__name__)
    return program


def _compare_empty(example: Example, program: ExportedProgram, name: str) -> None:
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
            raise ExportError(
                f"{name} cannot be exported: for a batch of {samples} samples and no ids, its code does something else "
                "than for other batches, which a traced program cannot: write the branch with torch.where or "
                f"torch.cond. Here is the difference: {error}"
            ) from error
