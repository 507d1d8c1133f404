"""``shardrec.serve.package``: compile a model by AOTInductor into a ``.pt2`` file; ``load_package``: call such a file.

The file holds machine code for the processor (or the GPU) that it was compiled on, the weights, and calls of fbgemm's
operators by name. It runs with torch and fbgemm's operators, without shardrec and without Python.

[Note: what compiled code does not check]
AOTInductor's code assumes the dtypes and strides that it was compiled for and does not check its inputs. So the file
records the spec of each argument, and callers check it: :class:`Package` and the C++ example do.

[Note: no waiting inside the loader]
torch's loader holds the GIL while it waits for a free runner, and some of fbgemm's operators have autograd code in
Python, which needs the GIL: two threads and one runner deadlock. So threads wait here, before they call the loader; and
the call runs in inference mode, which skips the autograd code (a third of the time of a small call).
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
from shardrec.serve.program import ExportError, program_of, served
from shardrec.serve.program_file import NOTES, notes_of
from shardrec.serve.served_model import ServedModel

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

    The package takes any batch size and any number of ids; bad input raises, as in eager mode. The machine code is for
    the kind of processor that it was compiled on, and the loops that AOTInductor generates run on one thread (fbgemm's
    operators and matrix products on torch's threads). ``torch._inductor.aoti_load_package`` and
    ``torch::inductor::AOTIModelPackageLoader`` load the file; :func:`load_package` checks the inputs as well.

    Args:
        model: a model sharded over one rank, or made from one by :func:`shardrec.serve.quantize`; in eval mode. Tables
            that are not quantized are packaged in float32.
        path: path of the file; it ends in ``.pt2``.
        args: positional arguments of an example call; only dtypes, sizes and keys are read.
        kwargs: keyword arguments of the example call.
        static: names of tensors whose size never changes; of other tensors the first dimension is the samples.
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
        # One thread for the loops that AOTInductor generates: they take a small part of the time.
        "cpp.threads": 1,
        # Tables are memory-mapped from the file instead of passing through the assembler.
        "aot_inductor.force_mmap_weights": True,
        "aot_inductor.metadata": {NOTES: notes},
        **(options or {}),
    }
    # Written in a temporary folder under the final name, which the file also contains, and moved at the end, so that no
    # process loads an incomplete file.
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
    except Exception as error:  # its class depends on the compiler pass that fails
        raise ExportError(f"AOTInductor cannot compile {type(model.module).__name__}: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return target


def _notes(model: ServedModel, example: Example, program: ExportedProgram) -> dict[str, Any]:
    """The description of inputs and outputs that the file contains, as JSON values."""
    spec = program.call_spec.out_spec
    assert spec is not None, "an exported program has outputs"
    output = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    if not _is_plain(output):
        raise ConfigError(
            f"{type(model.module).__name__} returns {type(output).__name__}, or something inside it that is no tensor; "
            "a package returns tensors, and dicts (by strings), lists and tuples of them: return such, for example "
            "KeyedTensor.values()"
        )
    tensors = [spec.note() for spec in example.specs]
    return notes_of(example.entry, model) | {"tensors": tensors, "output": output}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    # Named tuples are refused, since JSON would lose their names.
    return type(value) is int or (type(value) in (list, tuple) and all(map(_is_plain, value)))


class Package:
    """A loaded file of :func:`package`, called like the entry: with plain tensors, in order or by name.

    Args:
        path: path of the file.
        runners: number of calls that can run at the same time.

    Attributes:
        features: the keys whose bags ``lengths`` counts, in order.
        tensors: the spec of each argument.
    """

    def __init__(self, path: str | os.PathLike[str], runners: int = 1) -> None:
        # Registers the operators that the file calls by name.
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
        """Run the model; the tensors in its output are inference tensors.

        Raises:
            InputError: if a tensor has another dtype, size or device than the model takes, if an id is outside its
                table, or if the lengths do not fit the ids.
        """
        if named or len(tensors) != len(self._names):
            tensors = self._ordered(tensors, named)
        fault = self._fault(tensors)
        if fault:
            raise InputError(f"bad input: {fault}")
        try:
            with self._free, torch.inference_mode():
                # Compiled code assumes the strides of contiguous tensors.
                leaves = self._loader.boxed_run([tensor.contiguous() for tensor in tensors])
        except RuntimeError as error:
            if "bad input" in str(error):
                raise InputError(str(error)) from error
            raise
        return pytree.tree_unflatten(leaves, self._output)

    def _ordered(self, tensors: Sequence[Tensor], named: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        by_name = {**dict(zip(self._names, tensors, strict=False)), **named}
        if len(tensors) + len(named) != len(self._names) or len(by_name) != len(self._names):
            raise InputError(f"the model takes {', '.join(self._names)}, each once: give {len(self._names)} tensors")
        unknown = [name for name in named if name not in self._names]
        if unknown:
            raise InputError(f"the model takes {', '.join(self._names)}, and no {', '.join(unknown)}")
        return tuple(by_name[name] for name in self._names)

    def _fault(self, tensors: Sequence[Tensor]) -> str:
        """A message about arguments that do not fit; empty if they fit."""
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
    """Load a file of :func:`package` as a function of plain tensors.

    Args:
        path: path of the file. Load only files that you trust: their machine code is run.
        runners: number of calls that can run at the same time, from several threads; each has its own buffers, and
            they share the weights.

    Raises:
        ConfigError: if there is no such file, or if another program wrote it.
    """
    return Package(path, runners)
