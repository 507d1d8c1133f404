"""``shardrec doctor``: can this machine train, and if not, why."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated

import typer

import shardrec
from shardrec import ConfigError, ShardrecError
from shardrec.trainer.cli.flags import Device

if TYPE_CHECKING:
    import torch

_PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec", "torchmetrics", "numpy", "pyarrow")


def doctor(
    device: Annotated[Device | None, typer.Option(help="Device to check (default: cuda where torch sees it)")] = None,
) -> None:
    """Show versions, devices and threads, and check that this machine can train.

    The packages must match, ranks must reach each other, and a small sharded model must train and script on the device.

    Example: shardrec doctor --device cpu
    """
    typer.echo(f"shardrec {shardrec.__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    for package in _PACKAGES:
        try:
            typer.echo(f"  {package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("versions", _versions),
        ("threads", _threads),
        ("device", partial(_device, device)),
        ("gloo", _gloo),
        ("exchange", _exchange),
        ("C++", _native),
    )
    failed = [name for name, check in checks if not _passes(name, check)]
    if not {"versions", "device"} & set(failed):
        failed += [name for name, check in _on_device(_chosen(device)) if not _passes(name, check)]
    if failed:
        raise typer.Exit(1)


def _passes(name: str, check: Callable[[], str]) -> bool:
    try:
        typer.echo(f"{name:>9}: {check()}")
    except (ShardrecError, ImportError, OSError, RuntimeError) as error:
        typer.echo(f"{name:>9}: PROBLEM: {error}")
        return False
    return True


def _versions() -> str:
    from shardrec.launch import check_versions

    check_versions()
    import torchrec  # noqa: F401 - what it needs besides, such as iopath in some releases, may be missing

    return "torch, fbgemm-gpu and torchrec match, fbgemm-gpu's operators load, and torchrec imports"


def _threads() -> str:
    import torch

    limit = os.environ.get("OMP_NUM_THREADS")
    set_by = f" (OMP_NUM_THREADS={limit})" if limit else ""
    return f"{len(os.sched_getaffinity(0))} cores for this process, {torch.get_num_threads()} threads in torch{set_by}"


def _device(wanted: Device | None) -> str:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        if wanted == "cuda":
            what = f"it is built for CUDA {built}: install a driver for it" if built else "it is the build for the CPU"
            raise ConfigError(f"--device is 'cuda' and torch sees no CUDA device ({what})")
        return "cpu (torch sees no CUDA device)"
    names = ", ".join(
        f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor})"
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    )
    return f"cpu, cuda: {names}; CUDA {torch.version.cuda}, driver {_driver()}"


def _driver() -> str:
    try:
        with open("/proc/driver/nvidia/version", encoding="utf-8") as file:
            return next((word for word in file.readline().split() if word[:1].isdigit() and "." in word), "unknown")
    except OSError:
        return "unknown"


def _chosen(wanted: Device | None) -> torch.device:
    import torch

    name = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def _on_device(device: torch.device) -> tuple[tuple[str, Callable[[], str]], ...]:
    """Small steps, each by itself."""
    from shardrec.trainer.cli import selftest  # with torch and torchrec

    return (
        ("fbgemm", partial(selftest.fbgemm_build, device)),
        ("NCCL" if device.type == "cuda" else "one rank", partial(selftest.collectives, device)),
        ("training", partial(selftest.training_lookup, device)),
        ("scripted", partial(selftest.scripted_lookup, device)),
    )


def _exchange() -> str:
    from shardrec.launch import host_identity

    if not host_identity():
        return "through the process group (this system lacks memfd_create or Unix sockets to share memory with)"
    return "through shared memory between ranks of this host with tables on the CPU"


def _native() -> str:
    from shardrec.launch import has_operators

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if has_operators():
            return "the operators compiled for this torch are loaded"
    return str(said[-1].message) if said else "torch's operators are used (SHARDREC_NATIVE=0)"


def _gloo() -> str:
    """An all-reduce between two ranks on threads of this process, over the network interface that gloo picks."""
    import torch
    import torch.distributed as dist

    store = dist.HashStore()

    def total(rank: int) -> float:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=10))
        value = torch.tensor([float(rank + 1)])
        group.allreduce([value]).wait()  # type: ignore[attr-defined]  # missing in torch's stub
        return float(value)

    remedy = "set GLOO_SOCKET_IFNAME to an interface that works, such as lo"
    try:
        with ThreadPoolExecutor(2) as ranks:
            sums = list(ranks.map(total, range(2)))
    except RuntimeError as error:
        raise RuntimeError(f"{str(error).splitlines()[0]}; {remedy}") from error
    if sums != [3.0, 3.0]:
        raise RuntimeError(f"two ranks added 1 and 2 and got {sums}; {remedy}")
    return "two ranks in this process added their numbers up"
