"""Presets of machines, with the figures of their data sheets.

Memory, its bandwidth and NVLink are from NVIDIA's data sheets, checked against pages that quote them (the list
below). A link's figure for both ways together is halved. The network is one adapter per GPU as in the vendor's
eight-GPU systems: DGX A100 200 Gb/s (ConnectX-6), DGX H100, H200 and B200 400 Gb/s (ConnectX-7,
docs.nvidia.com/dgx-basepod). For cards without NVLink the host link is PCIe, each way.

=========  ==========================================  ==============================================================
figure     of                                          seen on
=========  ==========================================  ==============================================================
memory     T4 320 GB/s, V100 900 (SXM2: 897)           sysrqmts.com (comparison of T4 and V100)
           A10 600, L4 300, L40S 864 GB/s              store.sourcecode.com, mullet.se, ai-hpc.github.io
           A100 1,555 (40 GB) and 2,039 GB/s (80 GB)   glennklockwood.com/garden/processors/A100 (quotes the sheet)
           H100 SXM 3.35, H200 4.8 TB/s and 141 GB     lzwjava.github.io, aiwiki.ai; PCIe H100 2 TB/s: NVIDIA PB-11133
           B200 8 TB/s; 1.4 TB in a DGX of eight       haink.org; docs.nvidia.com/dgx-basepod
NVLink     300, 600, 900, 1,800 GB/s both ways         alpha-one-index.github.io (V100, A100, H100 and H200, B200)
=========  ==========================================  ==============================================================

Not from a data sheet: the networks of T4, V100, A10G, L4 and L40S, which common cloud machines have, and the
latencies, which are typical of NCCL. A data sheet's "80 GB" is nearly 80 GiB. A device reports one or two per cent less
(see :func:`detect_machine`), and the framework needs some of it.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from shardrec.errors import ConfigError
from shardrec.layout.machine import Machine

_GIB = 2.0**30
_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9
_LINKS = {"t4": _PCIE3, "v100": _PCIE3, "h100": _PCIE5, "h100-pcie": _PCIE5, "h200": _PCIE5, "b200": _PCIE5}
_LATENCY = 20e-6


def _gpu(
    name: str, gib: float, bandwidth: float, host_link: float, gigabits: float, cache_mib: float, source: str
) -> Machine:
    return Machine(
        name=name,
        kind="cuda",
        device_memory=gib * _GIB,
        memory_bandwidth=bandwidth * 1e9,
        host_link=host_link,
        network=gigabits / 8 * 1e9,
        latency=_LATENCY,
        cache=cache_mib * 2**20,
        memory_link=_LINKS.get(name, _PCIE4),
        source=source,
    )


PRESETS = {
    machine.name: machine
    for machine in (
        _gpu("t4", 16, 320, _PCIE3, 50, 4, "NVIDIA T4 data sheet; PCIe 3.0 x16"),
        _gpu("v100", 32, 900, 150e9, 100, 6, "NVIDIA V100 data sheet (SXM2 32 GB, NVLink 300 GB/s both ways)"),
        _gpu("a10g", 24, 600, _PCIE4, 50, 6, "NVIDIA A10 data sheet; PCIe 4.0 x16"),
        _gpu("a100-40gb", 40, 1555, 300e9, 200, 40, "NVIDIA A100 data sheet (SXM 40 GB, NVLink 600 GB/s both ways)"),
        _gpu("a100-80gb", 80, 2039, 300e9, 200, 40, "NVIDIA A100 data sheet (SXM 80 GB, NVLink 600 GB/s both ways)"),
        _gpu("l4", 24, 300, _PCIE4, 50, 48, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
        _gpu("l40s", 48, 864, _PCIE4, 100, 96, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        _gpu("h100", 80, 3350, 450e9, 400, 50, "NVIDIA H100 data sheet (SXM, NVLink 900 GB/s both ways)"),
        _gpu("h100-pcie", 80, 2000, _PCIE5, 200, 50, "NVIDIA H100 data sheet (PCIe); PCIe 5.0 x16"),
        _gpu("h200", 141e9 / _GIB, 4800, 450e9, 400, 50, "NVIDIA H200 data sheet (SXM, NVLink 900 GB/s both ways)"),
        _gpu("b200", 180e9 / _GIB, 8000, 900e9, 400, 50, "NVIDIA DGX B200 data sheet (8 GPUs: 1,440 GB, 64 TB/s)"),
        Machine(
            name="cpu",
            kind="cpu",
            memory_bandwidth=8e9,
            host_link=1.2e9,
            network=1.2e9,
            latency=200e-6,
            cache=2**20,
            source="gloo ranks of one thread on a cloud machine, measured; no data sheet",
        ),
    )
}
"""By name. ``cpu`` has no memory limit. :func:`detect_machine` reads the real limit."""

# In the order in which they are tried: a longer name comes before its prefix.
_DEVICE_NAMES = (
    ("B200", "b200"),
    ("H200", "h200"),
    ("H100 PCIe", "h100-pcie"),
    ("H100", "h100"),
    ("A100", "a100-80gb"),
    ("L40S", "l40s"),
    ("L4", "l4"),
    ("A10", "a10g"),
    ("V100", "v100"),
    ("T4", "t4"),
)


def preset(name: str) -> Machine:
    """The preset of a name.

    Raises:
        ConfigError: for an unknown name. The message lists the known names.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}. The presets are {', '.join(PRESETS)}")
    return PRESETS[name]


def detect_machine(ranks_per_host: int = 1, *, device: str | None = None) -> Machine:
    """The machine that this process runs on.

    Args:
        ranks_per_host: ranks that share the host's memory.
        device: ``"cpu"`` or ``"cuda"``. Default: CUDA where torch sees a device.

    Raises:
        ConfigError: if CUDA is asked for and torch sees no device.
    """
    cuda = _sees_cuda()
    if device == "cuda" and not cuda:
        raise ConfigError("torch sees no CUDA device to detect. Give device='cpu', or a preset")
    host = host_memory() / max(ranks_per_host, 1)
    if not cuda or device == "cpu":
        return replace(PRESETS["cpu"], host_memory=host)
    import torch

    properties = torch.cuda.get_device_properties(0)
    name = next((machine for mark, machine in _DEVICE_NAMES if mark in properties.name), "v100")
    known = PRESETS[name]
    source = (
        known.source if known.name != "v100" or "V100" in properties.name else f"bandwidths of a V100: {known.source}"
    )
    return replace(
        known,
        name=properties.name,
        device_memory=float(properties.total_memory),
        host_memory=host,
        source=f"memory as torch reports it; {source}",
    )


def _sees_cuda() -> bool:
    """Whether torch sees a CUDA device. To learn it of the build for the CPU, torch is not imported."""
    if "torch" not in sys.modules and metadata.version("torch").endswith("+cpu"):
        return False
    import torch

    return torch.cuda.is_available()


def host_memory() -> float:
    """Bytes of this host's memory, or the limit of the process's control group if that is lower."""
    memory = float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            memory = min(memory, float(Path(path).read_text(encoding="ascii")))
    return memory


def default_machine(device: str | None = None) -> Machine:
    """The preset that a plan without a machine is made for.

    Its figures are from the data sheet, and do not depend on free memory, so that every rank makes the same plan.

    Args:
        device: ``"cpu"`` or ``"cuda"``, where the tables will be. Default: CUDA where torch sees a device.

    Raises:
        ConfigError: if CUDA is asked for and torch sees no device.
    """
    if device == "cpu" or (device is None and not _sees_cuda()):
        return PRESETS["cpu"]
    return detect_machine(device=device)
