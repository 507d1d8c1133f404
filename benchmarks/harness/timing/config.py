"""``TimingConfig``: which cases ``shardrec bench`` times, and how often."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, field_validator

from benchmarks.harness.timing.case import KERNELS, MODES, SIDES, TRANSPORTS
from benchmarks.harness.timing.environment import MALLOC
from benchmarks.harness.timing.plans import LAYOUTS
from benchmarks.harness.workload import PRESETS, parse_tables
from shardrec.errors import ConfigError
from shardrec.trainer.run.options import Options, option

__all__ = ["CASE_PRESETS", "TimingConfig"]

CASE_PRESETS = ("quick", "core", "full", "growth", "gpu")
"""``quick``: under two minutes, to see that it works. ``core``: the main cases of ``full``; three rounds take ten
minutes. ``full``: all that benchmarks/train reports. ``growth``: over ranks, tables and samples, and one rank beside
bare kernels. ``gpu``: one GPU beside bare kernels, for ``--device cuda``."""

_CASES, _RUN, _RANKS = "What to time", "How to time it", "Ranks"
_LISTS = ("workload", "layout", "mode", "ids", "optimizer", "malloc", "transport", "kernels", "side")


class TimingConfig(Options):
    """One run of the harness. Each field is, with dashes, a flag; its text is that flag's help.

    The cases are every combination of the lists; with a preset, those of its cases that the lists that were given
    leave.

    Raises:
        ConfigError: naming each option that cannot be honoured, its value and what it may be.
    """

    preset: str | None = option(
        None, _CASES, "Cases that are chosen already; the options below then choose among them.", choices=CASE_PRESETS
    )
    workload: tuple[str, ...] = option(
        (),
        _CASES,
        f"Tables: {', '.join(PRESETS)}, or of a kind. Lists take commas, or the flag again (default: criteo)",
        metavar="NAME|NUMBERxROWSxDIM[xIDS]",
    )
    layout: tuple[str, ...] = option(
        (), _CASES, "How the tables are cut (default: table_wise,row_wise)", choices=(*LAYOUTS,)
    )
    batch: tuple[PositiveInt, ...] = option((), _CASES, "Samples of each rank (default: 4096)", metavar="NUMBERS")
    mode: tuple[str, ...] = option(
        (), _CASES, "Embeddings forward, or trained, or a whole DLRM (default: forward,train)", choices=MODES
    )
    ids: tuple[str, ...] = option(
        (),
        _CASES,
        "Each row as likely, or as rank to the power of -1.05 (default: uniform)",
        choices=("uniform", "zipf"),
    )
    optimizer: tuple[str, ...] = option(
        (),
        _CASES,
        "Optimizer of the tables, fused into their backward (default: rowwise_adagrad)",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam"),
    )
    malloc: tuple[str, ...] = option(
        (),
        _CASES,
        "Both sides as they come, or malloc told to keep its memory, or left alone (default: default)",
        choices=tuple(MALLOC),
    )
    transport: tuple[str, ...] = option(
        (),
        _CASES,
        "How shardrec's ranks exchange: through shared memory, or gloo alone (default: auto)",
        choices=TRANSPORTS,
    )
    kernels: tuple[str, ...] = option(
        (),
        _CASES,
        "What shardrec looks rows up with on the CPU: its own kernels, or fbgemm's (default: own)",
        choices=KERNELS,
    )
    side: tuple[str, ...] = option(
        (), _CASES, "Who takes turns, shardrec among them (default: shardrec,torchrec)", choices=SIDES
    )
    max_rows: int = option(100_000, _CASES, "Most rows of a preset's table.", ge=1)

    rounds: int = option(3, _RUN, "Times that each side has its turn.", ge=1)
    steps: int = option(8, _RUN, "Steps of a turn, after three to warm up; fewer where they are long.", ge=3)
    seconds: float = option(2.0, _RUN, "Where a turn's steps take longer, there are fewer of them.", gt=0)
    minutes: float | None = option(None, _RUN, "Begin no more turns after so long; what is measured counts.", gt=0)
    out: str = option("runs/bench", _RUN, "Folder for timings.json and timings.png.", metavar="PATH")
    seed: int = option(0, _RUN, "Seed of ids and weights.", ge=0)

    nproc: int | None = option(
        None, _RANKS, "Ranks to start on this machine (default: 2; under torchrun, its ranks are joined)", ge=1
    )
    threads: int | None = option(None, _RANKS, "Threads of each rank (default: 1)", ge=1)
    device: str = option("cpu", _RANKS, "Where the tables live.", choices=("cpu", "cuda"))

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
