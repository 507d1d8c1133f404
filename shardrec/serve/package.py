"""``shardrec.serve.package``: a model compiled by AOTInductor into a ``.pt2`` file; and such a file as a function.

The file holds machine code for the processor (or the GPU) that it was compiled on, the weights, and calls of fbgemm's
operators by name. To run it takes torch and fbgemm's operators, no shardrec, and no Python.

[Note: what compiled code does not check]
AOTInductor's code reads its inputs as tensors of the dtypes and strides that it was compiled for, whatever it is given.
So the file says in words what each of them is, and callers compare: :class:`Package` does, the C++ example does.

[Note: no waiting inside the loader]
torch's loader waits for a free runner with the interpreter's lock in its hands, and fbgemm gives some operators Python
code for autograd, which needs that lock: two threads and one runner stand still for ever. So threads wait here, before
they call it; and the call is made in inference mode, which leaves autograd's code out (a third of a small call).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from shardrec.errors import ConfigError, InputError
from shardrec.modules import ShardedModel
from shardrec.serve.example import Example, TensorSpec, example_of
from shardrec.serve.model import ServedModel
from shardrec.serve.program import ExportError, program_of, served
from shardrec.serve.save import NOTES, notes_of

__all__ = ["Package", "load_package", "package"]


def package(
    model: ShardedModel,
    path: str | os.PathLike[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    static: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> Path:
    """Compile a one-rank model for inference, with AOTInductor.

    Any batch size is served, and any number of ids; bad input is an error, as in eager mode. The machine code is for
    the kind of processor that it was compiled on, and its own loops run on one thread (fbgemm's and matrix products on
    as many as torch has). ``torch._inductor.aoti_load_package`` and ``torch::inductor::AOTIModelPackageLoader`` load
    the file; :func:`load_package` checks the inputs as well.

    Args:
        model: sharded over one rank, or made of such a one by :func:`shardrec.serve.quantize`; in eval mode. Tables
            that are not quantized are packaged in float32.
        path: of the file, which ends in ``.pt2``.
        args: an example call's arguments: only dtypes, sizes and keys are looked at.
        kwargs: those by name.
        static: names of tensors that have the same size in each call; of others, the first dimension is the samples.
        options: settings of AOTInductor besides, as in ``torch._inductor.config``.

    Returns:
        The path. The file is complete, or what was there before.

    Raises:
        ConfigError: if the model is in training mode or on several ranks, if the example does not fit it, if its output
            is not made of tensors, dicts, lists and tuples, or if there is no C++ compiler.
        ExportError: if the model cannot be traced or compiled.
    """
    # A second of imports, which programs that only load or quantize go without.
    from torch._inductor import aoti_compile_and_package
    from torch._inductor.exc import InvalidCxxCompiler

    target = Path(path)
    if target.suffix != ".pt2":
        raise ConfigError(f"a package is named *.pt2, which is how loaders know it, and not {target.name}: rename it")
    model = served(model)
    world_size = model.context.collectives.world_size
    if world_size > 1:
        raise ConfigError(
            f"the model is sharded over {world_size} ranks, and a package is run by one process: shard it over one "
            "rank, or use shardrec.serve.save or shardrec.export, which keep the exchanges"
        )
    example = example_of(model, args, kwargs, static=static)
    program = program_of(example)
    notes = json.dumps(_notes(model, example, program))
    settings = {
        # One thread for the loops that AOTInductor writes, wherever it is run: their share of the time is small.
        "cpp.threads": 1,
        # Tables are mapped from the file, and not put through the assembler.
        "aot_inductor.force_mmap_weights": True,
        "aot_inductor.metadata": {NOTES: notes},
        **(options or {}),
    }
    # Under its final name, which the file repeats inside, in a temporary folder; moved at the end, so that no process
    # loads half a file.
    folder = Path(tempfile.mkdtemp(prefix=f".{target.stem}.", dir=target.parent))
    try:
        with torch.no_grad():
            made = aoti_compile_and_package(program, package_path=str(folder / target.name), inductor_configs=settings)
        Path(made).replace(target)
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "AOTInductor found no C++ compiler: install one (on Debian and Ubuntu: apt-get install g++), or name it in "
            f"the environment variable CXX. It said: {error}"
        ) from error
    except OSError:
        raise
    except Exception as error:  # of any class, by the pass that fails
        raise ExportError(f"AOTInductor cannot compile {type(model.module).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _notes(model: ServedModel, example: Example, program: ExportedProgram) -> dict[str, Any]:
    """What a caller has to know, as JSON."""
    spec = program.call_spec.out_spec
    assert spec is not None, "an exported program has outputs"
    output = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if not _is_plain(output):
        raise ConfigError(
            f"{type(model.module).__name__} returns {type(output).__name__}, or something inside it that is no tensor; "
            "a package returns tensors, and dicts (by strings), lists and tuples of them: return such, for example "
            "KeyedTensor.values()"
        )
    tensors = [one.note() for one in example.specs]
    return notes_of(example.entry, model) | {"tensors": tensors, "output": output}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    # Not named tuples, of which JSON would keep no names.
    return type(value) is int or (type(value) in (list, tuple) and all(map(_is_plain, value)))


class Package:
    """A file of :func:`package`, to be called like the entry: with plain tensors, in order or by their names.

    Args:
        path: the file.
        runners: how many calls can run at the same time.

    Attributes:
        features: the keys whose bags ``lengths`` counts, in order.
        tensors: what each argument is.
    """

    def __init__(self, path: str | os.PathLike[str], runners: int = 1) -> None:
        # Its operators are called by name.
        import fbgemm_gpu  # noqa: F401
        from torch._inductor.package import load_package as load

        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}: shardrec.serve.package writes one")
        if runners < 1:
            raise ConfigError(f"runners is {runners}; at least one is needed: name how many calls may run at a time")
        try:
            self._loader = load(str(path), num_runners=runners).loader
        except RuntimeError as error:
            reason = (str(error) or "no reason given").splitlines()[0]
            raise ConfigError(
                f"{path} cannot be loaded: {reason}; shardrec.serve.package writes what can, for this kind of "
                "processor and this torch"
            ) from error
        self._free = threading.BoundedSemaphore(runners)
        metadata = self._loader.get_metadata()
        if NOTES not in metadata:
            raise ConfigError(f"{path} was not written by shardrec.serve.package: load it with torch's loader")
        notes = json.loads(metadata[NOTES])
        self.features: tuple[str, ...] = tuple(notes["features"])
        self.tensors: tuple[TensorSpec, ...] = tuple(TensorSpec.of_note(note) for note in notes["tensors"])
        self._names = [spec.name for spec in self.tensors]
        self._device = metadata["AOTI_DEVICE_KEY"]
        self._output = pytree.treespec_loads(self._loader.get_call_spec()[1])

    def __call__(self, *tensors: Tensor, **named: Tensor) -> Any:
        """What the model returns, made of inference tensors.

        Raises:
            InputError: for tensors of other dtypes, sizes or devices than the model takes, for an id outside its table,
                and for lengths that do not fit the ids.
        """
        if named or len(tensors) != len(self._names):
            tensors = self._ordered(tensors, named)
        fault = self._fault(tensors)
        if fault:
            raise InputError(f"bad input: {fault}")
        try:
            with self._free, torch.inference_mode():
                # Compiled code reads them with the strides of a contiguous one.
                leaves = self._loader.boxed_run([tensor.contiguous() for tensor in tensors])
        except RuntimeError as error:
            if "bad input" in str(error):
                raise InputError(str(error)) from error
            raise
        return pytree.tree_unflatten(leaves, self._output)

    def _ordered(self, tensors: Sequence[Tensor], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        given = {**dict(zip(self._names, tensors, strict=False)), **named}
        if len(tensors) + len(named) != len(self._names) or len(given) != len(self._names):
            raise InputError(f"the model takes {', '.join(self._names)}, each once: give {len(self._names)} tensors")
        unknown = [name for name in named if name not in self._names]
        if unknown:
            raise InputError(f"the model takes {', '.join(self._names)}, and no {', '.join(unknown)}")
        return tuple(given[name] for name in self._names)

    def _fault(self, tensors: Sequence[Tensor]) -> str:
        """What is wrong with a call, in words; empty if nothing is."""
        sizes: dict[str, int] = {}
        for spec, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != spec.dtype or tensor.device.type != self._device:
                return (
                    f"{spec.name} is {tensor.dtype} on {tensor.device.type}; the package takes {spec.dtype} on "
                    f"{self._device}: convert it, or make the package from an example of this kind"
                )
            fault = spec.fault(tensor.shape, sizes)
            if fault:
                return fault
        return ""


def load_package(path: str | os.PathLike[str], *, runners: int = 1) -> Package:
    """A file of :func:`package` as a function of plain tensors.

    Args:
        path: the file; to be trusted, as its machine code will run.
        runners: how many calls can run at the same time, from several threads; each has its own buffers, and they
            share the weights.

    Raises:
        ConfigError: if there is no such file, or it was written by something else.
    """
    return Package(path, runners)
