"""Build the C++ program with CMake, against the libtorch inside the installed torch wheel, and run it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import fbgemm_gpu
import torch

__all__ = ["OPERATORS", "BuildError", "build", "missing_tool", "run", "start"]

HERE = Path(__file__).parent
OPERATORS = Path(fbgemm_gpu.__file__).parent
"""The folder of fbgemm's operator libraries."""


class BuildError(RuntimeError):
    """The program cannot be built here, or does not run."""


def missing_tool() -> str | None:
    """A sentence that names the tools to install before the program can be built. None if all are installed."""
    if shutil.which("cmake") is None:
        return "cmake is not on PATH: install it (on Debian and Ubuntu: apt-get install cmake)"
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return "no C++ compiler is on PATH: install one (on Debian and Ubuntu: apt-get install g++)"
    return None


def build(folder: Path) -> Path:
    """Configure and build. This is quick if nothing has changed.

    Args:
        folder: the build folder.

    Returns:
        The program.

    Raises:
        BuildError: if a tool is missing or fails, with its output.
    """
    missing = missing_tool()
    if missing is not None:
        raise BuildError(missing)
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_BUILD_TYPE=Release"]
    _succeed(["cmake", "-S", str(HERE), "-B", str(folder), *options])
    _succeed(["cmake", "--build", str(folder)])
    return folder / "serve"


def run(program: Path, model: Path, lines: str, *options: str) -> str:
    """What the program says to lines on its stdin.

    Raises:
        BuildError: if it ends with an error.
    """
    return _succeed(_command(program, model, *options), lines)


def start(program: Path, model: Path, *options: str) -> subprocess.Popen[str]:
    """The program, which answers a line on its stdin by one on its stdout. Other output is on its stderr."""
    pipe = subprocess.PIPE
    return subprocess.Popen(_command(program, model, *options), stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def _command(program: Path, model: Path, *options: str) -> list[str]:
    return [str(program), "--model", str(model), "--operators", str(OPERATORS), *options]


def _succeed(command: list[str], lines: str = "") -> str:
    done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-30:])
        raise BuildError(f"{command[0]} ended with {done.returncode} ({' '.join(command)}):\n{said}")
    return done.stdout
