"""The surroundings of a run: malloc's settings, and what is written down about the machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.template import ONE_THREAD

__all__ = ["MALLOC", "Malloc", "load_average", "machine_record", "template_environment"]

_KEPT = str(2**40)
Malloc = Literal["default", "keep", "alone"]

MALLOC: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "keep": {
        "MALLOC_MMAP_THRESHOLD_": _KEPT,
        "MALLOC_TRIM_THRESHOLD_": _KEPT,
        "MALLOC_TOP_PAD_": str(64 * 2**20),
    },
    "alone": {"SHARDREC_KEEP_MEMORY": "0"},
}
"""``default``: each side as it comes. Shardrec makes its process keep large blocks (:mod:`shardrec.memory`). ``keep``:
malloc is told to take no block from mmap and to give nothing back, for all the sides alike. ``alone``: malloc as it
comes for all of them, shardrec told to leave it."""

_RECORDED = ("LD_PRELOAD", "GLIBC_TUNABLES", "OMP_", "MKL_", "MALLOC_", "NCCL_", "SHARDREC_")


def template_environment(malloc: Mapping[str, str]) -> dict[str, str]:
    """Variables of the process that ranks are forked from: the user's own, without other settings of malloc."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "SHARDREC_"))}
    return {**kept, **ONE_THREAD, "TORCH_CPP_LOG_LEVEL": "ERROR", **malloc}


def load_average() -> list[float]:
    """Of the last 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


def machine_record(*, own_ranks: bool) -> dict[str, Any]:
    """The processor, the C library, and the variables that change how fast things are.

    Args:
        own_ranks: the ranks get variables of :func:`template_environment`, not this process's.
    """
    here = os.environ if not own_ranks else template_environment({})
    return {
        "cpu": _cpu_name(),
        "cpus_online": os.cpu_count(),
        "libc": " ".join(platform.libc_ver()),
        "kernel": platform.release(),
        "variables": {name: value for name, value in here.items() if name.startswith(_RECORDED)},
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
