"""Files of :func:`shardrec.serve.package`, loaded and called.

[Note: what compiled code does not check]
AOTInductor's code assumes the dtypes and strides that it was compiled for and does not check its inputs. So the file
records a spec per argument, and callers check it: :class:`Package` and the C++ example do.

[Note: no waiting inside the loader]
torch's loader holds the GIL while it waits for a free runner, and some of fbgemm's operators have autograd code in
Python, which needs the GIL: two threads and one runner deadlock. So threads wait here, before they call the loader; and
the call runs in inference mode, which skips the autograd code (a third of the time of a small call).
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardrec.errors import ConfigError, InputError
from shardrec.serve.example import TensorSpec
from shardrec.serve.exporter import NOTES


class Package:
    """A loaded file of :func:`shardrec.serve.package`, called like the entry: with plain tensors, in order or by name.

    Args:
        path: path of the file.
        runners: number of calls that can run at the same time.

    Attributes:
        features: the keys of the bags that ``lengths`` counts, in order.
        tensors: the spec per argument.
    """

    def __init__(self, path: str | os.PathLike[str], runners: int = 1) -> None:
        # Registers the operators that the file calls by name.
        import fbgemm_gpu  # noqa: F401
        from torch._inductor.package import load_package as load

        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}: shardrec.serve.package writes one")
        if runners < 1:
            raise ConfigError(f"runners is {runners}. At least one is needed: name how many calls may run at a time")
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
        """Run the model. The tensors in its output are inference tensors.

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
        """A message about arguments that do not fit. Empty if they fit."""
        sizes: dict[str, int] = {}
        for spec, tensor in zip(self.tensors, tensors, strict=True):
            if tensor.dtype != spec.dtype or tensor.device.type != self._device:
                return (
                    f"{spec.name} is {tensor.dtype} on {tensor.device.type}. The package takes {spec.dtype} on "
                    f"{self._device}: convert it, or make the package from an example of this kind"
                )
            fault = spec.fault(tensor.shape, sizes)
            if fault:
                return fault
        return ""


def load_package(path: str | os.PathLike[str], *, runners: int = 1) -> Package:
    """Load a file of :func:`shardrec.serve.package` as a function of plain tensors.

    Args:
        path: path of the file. Load only files that you trust: their machine code is run.
        runners: number of calls that can run at the same time, from several threads. Each has its own buffers, and
            they share the weights.

    Raises:
        ConfigError: if the file does not exist, or if another program wrote it.
    """
    return Package(path, runners)
