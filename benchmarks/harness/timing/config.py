"""``TimingConfig``: which cases ``shardrec bench`` times, and how often."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import PositiveInt, field_validator

from benchmarks.harness.timing.case import Kernels, Mode, Side, Transport
from benchmarks.harness.timing.environment import Malloc
from benchmarks.harness.timing.plans import CaseLayout
from benchmarks.harness.workload import PRESETS, parse_tables
from shardrec.errors import ConfigError
from shardrec.trainer.run.options import Options, option

__all__ = ["CasePreset", "TimingConfig"]

CasePreset = Literal["quick", "core", "full", "growth", "gpu"]
"""``quick``: under two minutes, to see that it works. ``core``: the main cases of ``full``; three rounds take ten
minutes. ``full``: all that benchmarks/train reports. ``growth``: over ranks, tables and samples, and one rank beside
bare kernels. ``gpu``: one GPU beside bare kernels, for ``--device cuda``."""

_LISTS = ("workload", "layout", "mode", "ids", "optimizer", "malloc", "transport", "kernels", "side")


class _Cases(Options):
    panel = "What to time"

    preset: CasePreset | None = None
    """A set of cases. The options below choose among them."""
    workload: tuple[str, ...] = option(
        (),
        help=f"Tables: {', '.join(PRESETS)}, or 26x20000x64. Use commas, or repeat the flag (default: criteo)",
        metavar="NAME|NUMBERxROWSxDIM[xIDS]",
    )
    layout: tuple[CaseLayout, ...] = ()
    """How the tables are cut (default: table_wise,row_wise)"""
    batch: tuple[PositiveInt, ...] = option((), metavar="NUMBERS")
    """Samples of each rank (default: 4096)"""
    mode: tuple[Mode, ...] = ()
    """Embeddings forward, embeddings trained, or a whole DLRM (default: forward,train)"""
    ids: tuple[Literal["uniform", "zipf"], ...] = ()
    """Equally likely rows, or the k-th row by k to the power of -1.05 (default: uniform)"""
    optimizer: tuple[Literal["sgd", "adagrad", "rowwise_adagrad", "adam"], ...] = ()
    """Optimizer of the tables, fused into their backward (default: rowwise_adagrad)"""
    malloc: tuple[Malloc, ...] = ()
    """Leave malloc unchanged, keep memory on all sides, or keep glibc's defaults on all sides (default: default)"""
    transport: tuple[Transport, ...] = ()
    """How shardrec's ranks exchange: through shared memory, or gloo alone (default: auto)"""
    kernels: tuple[Kernels, ...] = ()
    """shardrec's CPU kernels: its own, or fbgemm's (default: own)"""
    side: tuple[Side, ...] = ()
    """Sides that take turns, shardrec among them (default: shardrec,torchrec)"""
    max_rows: int = option(100_000, ge=1)
    """Most rows of a preset's table."""


class _Run(Options):
    panel = "How to time it"

    rounds: int = option(3, ge=1)
    """Times that each side has its turn."""
    steps: int = option(8, ge=3)
    """Steps of a turn, after three to warm up. Long steps are fewer."""
    seconds: float = option(2.0, gt=0)
    """Seconds that the steps of a turn may take, with three steps at least."""
    minutes: float | None = option(None, gt=0)
    """Minutes after which no more turns begin. Measured turns count."""
    out: str = option("runs/bench", metavar="PATH")
    """Folder for timings.json and timings.png."""
    seed: int = option(0, ge=0)
    """Seed of ids and weights."""


class _Ranks(Options):
    panel = "Ranks"

    nproc: int | None = option(None, ge=1)
    """Ranks to start on this machine (default: 2; under torchrun, its ranks are joined)"""
    threads: int | None = option(None, ge=1)
    """Threads of each rank (default: 1)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the tables live."""


class TimingConfig(_Ranks, _Run, _Cases):
    """One run of the harness. Each field is, with dashes, a flag; its text is that flag's help.

    The cases are every combination of the lists; with a preset, those of its cases that the lists that were given
    leave.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and what it may be.
    """

    @field_validator(*_LISTS, mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        """``("a,b", "c")`` as ``("a", "b", "c")``."""
        items = [value] if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
            return items
        return [part.strip() for item in items for part in item.split(",")]

    def structural_faults(self) -> list[str]:
        """See :class:`Options`."""
        faults = []
        for text in self.workload:
            try:
                parse_tables([text], max_rows=self.max_rows)
            except ConfigError as error:
                faults.append(str(error).replace("tables (--tables)", "workload (--workload)"))
        if self.side and "shardrec" not in self.side:
            faults.append(
                f"side (--side) is {', '.join(self.side)}: give shardrec, too, which the others are compared with"
            )
        return faults
