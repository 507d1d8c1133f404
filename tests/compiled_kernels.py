"""Kernels in Triton compiled for a GPU, where there is none: to machine code, by the assembler that Triton brings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["compile_kernels"]

_COMPILE = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, types, calls = json.loads(sys.argv[1])
for name, constants in calls:
    kernel = getattr(import_module(module), name)
    names = kernel.arg_names
    signature = {name: "constexpr" if name.isupper() else types.get(name, "i32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert ".target sm_90" in compiled.asm["ptx"] and compiled.asm["cubin"]
"""


def compile_kernels(module: str, types: dict[str, str], calls: list[tuple[str, dict[str, Any]]], cache: Path) -> None:
    """Compile kernels for compute capability 9.0, in another process, whose Triton interprets nothing.

    Args:
        module: of the kernels.
        types: of their arguments, by name; default: int32.
        calls: name of a kernel, and its constants.
        cache: an empty folder.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", _COMPILE, json.dumps([module, types, calls])]
    subprocess.run(command, check=True, env=environment, cwd=Path(__file__).parents[1])
