"""The C++ libraries, which are left out where they cannot be compiled; all else is in setup.cfg."""

from __future__ import annotations

import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# Sanitizers to compile with, as -fsanitize takes them: see `make sanitize`. The last -O and -g given count.
_SANITIZERS = os.environ.get("SHARDREC_SANITIZE")
_SANITIZE = [f"-fsanitize={_SANITIZERS}", "-fno-sanitize-recover=all"] if _SANITIZERS else []
# Where an install would do without operators that do not compile: see `make wheel`.
_REQUIRED = bool(_SANITIZERS) or os.environ.get("SHARDREC_OPERATORS") == "required"
# Checks as calls, and none that only say earlier what the address sanitizer says: lookup.cpp took minutes otherwise.
_CHEAPER = ["-fno-sanitize=null,alignment,object-size,vptr", "--param=asan-instrumentation-with-call-threshold=0"]
_LAST_FLAGS = [*_SANITIZE, *_CHEAPER, "-O1", "-g1", "-fno-omit-frame-pointer"] if _SANITIZERS else []


class ParallelBuild(build_ext):
    """Compiles the sources of an extension side by side, half a minute each, and not again while they are the same."""

    def build_extension(self, ext: Extension) -> None:
        """Compile and link, or take the library that an editable install has compiled."""
        before = Path(self.get_ext_filename(ext.name))
        newest = max(Path(source).stat().st_mtime for source in (*ext.sources, *ext.depends))
        if before.is_file() and before.stat().st_mtime > newest and not (self.force or _SANITIZERS):
            out = Path(self.get_ext_fullpath(ext.name))
            out.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(before, out)
            return
        compiler = self.compiler.compiler_so_cxx[0]
        if _REQUIRED and shutil.which(compiler) is None:
            raise SystemExit(
                f"the C++ operators need a C++ compiler, and {compiler} is none on PATH: install one (on Debian and "
                "Ubuntu: apt-get install g++), or name it with CXX=..."
            )
        compile_all = self.compiler.compile

        def compile_each(sources: list[str], *args: Any, **kwargs: Any) -> list[str]:
            with ThreadPoolExecutor(min(len(sources), os.cpu_count() or 1)) as pool:
                objects = pool.map(lambda source: compile_all([source], *args, **kwargs), sources)
                return [one for found in objects for one in found]

        self.compiler.compile = compile_each
        try:
            super().build_extension(ext)
        finally:
            self.compiler.compile = compile_all


def operators() -> list[Extension]:
    """The operators, built for the torch that is installed; none without torch."""
    # A CUDA build of torch warns where nvcc is on PATH and no GPU is there; these operators need neither.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        if _REQUIRED:
            raise SystemExit("the C++ operators are compiled for the torch that is installed, and none is") from None
        return []
    # The name carries torch's version: a library built for another one is never loaded.
    version = "".join(letter if letter.isalnum() else "_" for letter in torch.__version__)
    return [
        Extension(
            f"shardrec.native.ops_for_torch_{version}",
            [f"shardrec/native/{name}.cpp" for name in ("ops", "cut", "ids", "lookup", "texts", "update")],
            depends=["setup.py", *map("shardrec/native/{}.h".format, ("gradient", "hashing", "slots", "vectors"))],
            include_dirs=cpp_extension.include_paths(),
            library_dirs=cpp_extension.library_paths(),
            libraries=["c10", "torch", "torch_cpu"],
            extra_compile_args=[
                "-std=c++20",
                "-O3",
                "-g0",
                "-fno-math-errno",
                "-Wno-psabi",
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *_LAST_FLAGS,
            ],
            extra_link_args=_SANITIZE,
            language="c++",
            optional=not _REQUIRED,
        )
    ]


setup(ext_modules=operators(), cmdclass={"build_ext": ParallelBuild})
