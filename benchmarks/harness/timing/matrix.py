"""Which cases a run has: every combination of the options, or a preset's cases (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from benchmarks.harness.timing.case import Case, fits
from benchmarks.harness.timing.config import TimingConfig
from shardrec.errors import ConfigError

__all__ = ["cases_of"]

_ALL_LAYOUTS = ("table_wise", "row_wise", "column_wise", "mixed", "planner")


def cases_of(config: TimingConfig) -> list[Case]:
    """The cases of a run, each once.

    Raises:
        ConfigError: if the options leave none of the preset's cases.
    """
    if config.preset is None:
        found = list(_combinations(config))
    else:
        cases = {"quick": _quick, "core": _core, "full": _full, "growth": _growth, "gpu": _gpu}[config.preset]()
        if config.preset != "growth" and config.nproc is not None:
            cases = [replace(case, ranks=config.nproc) for case in cases]
        found = [_with_options(case, config) for case in cases if _is_chosen(case, config)]
        if not found:
            raise ConfigError(f"preset (--preset) {config.preset!r} has no such case: leave out an option that chooses")
    return list({case.key: case for case in found}.values())


def _combinations(config: TimingConfig) -> Iterator[Case]:
    for malloc, transport, kernels, mode, workload, layout, batch, ids, optimizer in product(
        config.malloc or ("default",),
        config.transport or ("auto",),
        config.kernels or ("own",),
        config.mode or ("forward", "train"),
        config.workload or ("criteo",),
        config.layout or ("table_wise", "row_wise"),
        config.batch or (4096,),
        config.ids or ("uniform",),
        config.optimizer or ("rowwise_adagrad",),
    ):
        case = Case(
            workload=workload,
            layout=layout,
            batch_size=batch,
            mode=mode,
            ids=ids,
            optimizer=optimizer,
            malloc=malloc,
            transport=transport,
            kernels=kernels,
            ranks=config.nproc or 2,
            max_rows=config.max_rows,
        )
        yield replace(case, sides=_fitting(case, config.side)) if config.side else case


def _is_chosen(case: Case, config: TimingConfig) -> bool:
    if config.device == "cuda" and case.surroundings:
        return False  # none of them is about a device's memory, links and kernels
    asked = (
        (config.malloc, case.malloc),
        (config.transport, case.transport),
        (config.kernels, case.kernels),
        (config.mode, case.mode),
        (config.workload, case.workload),
        (config.layout, case.layout),
        (config.batch, case.batch_size),
        (config.ids, case.ids),
        (config.optimizer, case.optimizer),
        (() if config.nproc is None else (config.nproc,), case.ranks),
    )
    return all(not wanted or value in wanted for wanted, value in asked)


def _with_options(case: Case, config: TimingConfig) -> Case:
    case = replace(case, max_rows=config.max_rows)
    return replace(case, sides=_fitting(case, config.side or case.sides))


def _fitting(case: Case, sides: tuple[str, ...]) -> tuple[str, ...]:
    """The sides that the case makes sense for."""
    return tuple(side for side in sides if fits(case, side))


def _some(
    workloads: Iterable[str],
    layouts: Iterable[str],
    batches: Iterable[int],
    modes: Iterable[str] = ("train",),
    **rest: str,
) -> Iterator[Case]:
    for mode, workload, layout, batch in product(modes, workloads, layouts, batches):
        yield Case(workload=workload, layout=layout, batch_size=batch, mode=mode, **rest)  # type: ignore[arg-type]


def _quick() -> list[Case]:
    return [
        *_some(["criteo"], ["table_wise", "row_wise"], [4096]),
        *_some(["criteo"], ["table_wise"], [4096], ["forward"]),
        *_some(["small"], ["mixed"], [512]),
    ]


def _core() -> list[Case]:
    both = ("table_wise", "row_wise")
    return [
        *_some(["criteo"], both, [512, 4096]),
        *_some(["multi_hot"], both, [512]),
        *_some(["multi_hot"], ["table_wise"], [4096]),
        *_some(["small"], ["mixed"], [512]),
        *_some(["criteo"], both, [4096], malloc="keep"),
        *_some(["multi_hot"], ["table_wise"], [512], malloc="keep"),
        *_some(["criteo"], ["table_wise"], [4096], ["forward"]),
        *_some(["criteo"], both, [4096], ["dlrm"]),
    ]


def _full() -> list[Case]:
    both = ("table_wise", "row_wise")
    return [
        *_some(["criteo"], _ALL_LAYOUTS, [512, 4096]),
        *_some(["criteo"], both, [16384]),
        *_some(["criteo"], both, [4096], ids="zipf"),
        *_some(["criteo"], ["column_wise"], [4096], optimizer="adagrad"),
        *_some(["multi_hot"], [*both, "planner"], [512]),
        *_some(["multi_hot"], ["table_wise"], [4096]),
        *_some(["small"], ["mixed"], [512, 4096]),
        *(
            replace(case, sides=("shardrec", "torchrec", "torch"))
            for case in _some(["small"], ["table_wise", "planner"], [4096])
        ),
        *_some(["criteo"], _ALL_LAYOUTS, [4096], ["forward"]),
        *_some(["criteo"], both, [512], ["forward"]),
        *_some(["multi_hot"], both, [512], ["forward"]),
        *_some(["small"], ["mixed"], [512, 4096], ["forward"]),
        *_some(["criteo"], [*both, "planner"], [4096], ["dlrm"]),
        *_some(["criteo"], _ALL_LAYOUTS, [4096], malloc="keep"),
        *_some(["criteo"], both, [512], malloc="keep"),
        *_some(["multi_hot"], ["table_wise"], [512], malloc="keep"),
        *_some(["small"], ["mixed"], [4096], malloc="keep"),
        *_some(["criteo"], both, [4096], malloc="alone"),
        *_some(["criteo"], [*both, "planner"], [4096], transport="group"),
        *_some(["criteo"], both, [512], transport="group"),
        *_some(["small"], ["mixed"], [4096], transport="group"),
        *_some(["criteo"], [*both, "planner"], [4096], kernels="fbgemm"),
        *_some(["criteo"], ["table_wise"], [4096], ["forward"], kernels="fbgemm"),
        *_some(["multi_hot"], ["table_wise"], [512], kernels="fbgemm"),
        *_some(["small"], ["mixed"], [4096], kernels="fbgemm"),
    ]


def _gpu() -> list[Case]:
    """The main ones first, for a time limit may cut the others off."""
    cases = [
        *_some(["criteo_128"], ["table_wise"], [16384], ["train", "forward"]),
        *_some(["criteo_128"], ["table_wise"], [16384], ["dlrm"]),
        *_some(["criteo_128"], ["table_wise"], [4096, 65536], ["train", "forward"]),
        *_some(["criteo_128"], ["table_wise"], [4096, 16384, 65536], ids="zipf"),
        *_some(["multi_hot"], ["table_wise"], [4096], ["train", "forward"]),
        *_some(["small"], ["table_wise"], [4096], ["train", "forward"]),
    ]
    sides = ("shardrec", "torchrec", "kernels")
    alone = [replace(case, ranks=1) for case in cases]
    return [replace(case, sides=_fitting(case, sides)) for case in alone]


def _growth() -> list[Case]:
    one = replace(
        next(_some(["criteo"], ["table_wise"], [4096])), ranks=1, sides=("shardrec", "kernels", "torchrec", "torch")
    )
    return [
        *(replace(one, group="over bare kernels", mode=mode) for mode in ("forward", "train")),
        *(
            replace(case, ranks=ranks, group="ranks")
            for ranks in (1, 2, 4)
            for case in _some(["24x50000x64"], ["table_wise"], [2048])
        ),
        *(
            replace(case, group="tables")
            for case in _some([f"{count}x1000x16" for count in (10, 30, 100, 300, 1000)], ["table_wise"], [512])
        ),
        *(
            replace(case, group="samples")
            for case in _some(["8x100000x64"], ["table_wise"], [64, 256, 1024, 4096, 16384, 65536])
        ),
        # The same ids and bytes in all: a tenth of the tables, ten times the samples.
        *(
            replace(case, group="200 tables as 20")
            for case in (*_some(["200x5000x16"], ["table_wise"], [512]), *_some(["20x5000x16"], ["table_wise"], [5120]))
        ),
    ]
