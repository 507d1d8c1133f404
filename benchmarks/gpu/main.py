"""One GPU, measured by one command: ``make gpu``, or ``python -m benchmarks.gpu.main``.

::

    doctor     versions, device, driver, NCCL through the exchange's code, a training lookup, a scripted one
    tests      those that need a CUDA device
    timings    shardrec bench --preset gpu: shardrec, TorchRec and bare kernels in turn
    programs   eager, compiled, as a CUDA graph, profiled (benchmarks/gpu/programs.py)

Each part is a process of its own with a time limit. ``gpu.json`` and ``gpu.md`` are written anew after each of them,
from what the parts have left so far: what a limit cuts off costs the rest of one part. ``--resume`` leaves out the
parts that are done.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "page"]

_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000
_CUDA_TESTS = ("tests/modules/test_cuda.py", "tests/compile/test_cuda.py", "tests/modules/test_cuda_double.py")


def _commands(options: argparse.Namespace) -> dict[str, tuple[list[str], float]]:
    """Of each part, the arguments of Python and the minutes that it may take."""
    out, device = options.out, ["--device", options.device]
    sizes = ["--max-rows", str(options.max_rows)]
    batch = ["--batch", str(options.batch)] if options.batch else []
    timings = [*device, *sizes, *batch, "--nproc", "1", "--resume", "--out", str(out / "timings")]
    timings += ["--minutes", str(options.minutes), "--rounds", str(options.rounds)]
    return {
        "doctor": (["-m", "shardrec.cli", "doctor", *device], 5),
        "tests": (["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *_CUDA_TESTS], 10),
        "timings": (["-m", "shardrec.cli", "bench", "--preset", "gpu", *timings], options.minutes + 4),
        "programs": (
            ["-m", "benchmarks.gpu.programs", *device, *sizes, *batch, "--out", str(out / "programs.json")],
            options.minutes + 2,
        ),
    }


_LEFT = {"timings": "timings/timings.json", "programs": "programs.json"}
"""Files that parts leave."""


def _run(arguments: Sequence[str], minutes: float) -> dict[str, Any]:
    """Run a part; what it prints is shown and kept."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        printed, _ = process.communicate(timeout=60 * minutes)
        ended = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        _kill(process)
        printed, _ = process.communicate()
        ended = f"was stopped after {minutes:g} minutes"
    print(printed, flush=True)
    return {"ended": ended, "seconds": round(time.monotonic() - begin, 1), "printed": printed[-_TAIL:]}


def _kill(process: subprocess.Popen[str]) -> None:
    """The part and the processes that it started."""
    os.killpg(process.pid, signal.SIGKILL)


def _write(found: Mapping[str, Any], out: Path) -> None:
    """The JSON and the page, from what there is."""
    (out / "gpu.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (out / "gpu.md").write_text("\n".join(page(found)) + "\n", encoding="utf-8")


def page(found: Mapping[str, Any]) -> Iterable[str]:
    """Lines of Markdown.

    Args:
        found: what ``gpu.json`` holds.
    """
    yield "# One GPU"
    for name in ("doctor", "tests"):
        if name in found:
            yield from ("", f"## {name}", "", "```", found[name]["printed"].strip(), "```")
    if "timings" in found:
        yield from ("", "## Steps", "", *_timings(found["timings"].get("left") or {}))
    if "programs" in found:
        yield from ("", "## A DLRM step by each executor", "")
        for name, values in (found["programs"].get("left") or {}).items():
            yield f"- {name}: {json.dumps(values)}"
    cut = [f"{name} {part['ended']}" for name, part in found.items() if part["ended"]]
    if cut:
        yield from ("", f"Not whole: {'; '.join(cut)}.")


def _timings(report: Mapping[str, Any]) -> Iterable[str]:
    headings = ["case", "batch", "shardrec ms", "torchrec / shardrec", "kernels / shardrec"]
    yield _row([*headings, "kernels' share of copy bandwidth", "peak GiB by side"])
    yield _row(["---"] * 7)
    for one in report.get("cases", ()):
        case, ratios = one["case"], one["ratio_to_shardrec"]
        name = f"{case['mode']} {case['workload']}"
        if one["error"] is not None:
            yield _row([name, case["batch_size"], one["error"], "", "", "", ""])
        if not one["rounds"]:
            continue
        share = one["step_over_floor"].get("kernels")
        ratio = {side: f"{values['median']:.2f}" for side, values in ratios.items()}
        peaks = [max(turns[side]["peak_bytes"] for turns in one["rounds"]) / 2**30 for side in case["sides"]]
        cells = [name, case["batch_size"], f"{one['step_ms']['shardrec']['median']:.3f}"]
        cells += [ratio.get("torchrec", ""), ratio.get("kernels", ""), f"{1 / share:.0%}" if share else ""]
        yield _row([*cells, ", ".join(f"{size:.2f}" for size in peaks)])


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if any was not whole."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--parts", nargs="+", default=["doctor", "tests", "timings", "programs"])
    parser.add_argument("--max-rows", type=int, default=1_000_000, help="most rows of a table: what the memory holds")
    parser.add_argument("--batch", type=int, help="only this batch size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8, help="of the timings")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if options.resume and path.exists() else {}
    for name, (command, minutes) in _commands(options).items():
        if name not in options.parts or (name in found and not found[name]["ended"]):
            continue
        print(f"==> {name}", flush=True)
        left = options.out / _LEFT[name] if name in _LEFT else None
        if left is not None and not options.resume:
            left.unlink(missing_ok=True)
        found[name] = _run(command, minutes)
        if left is not None:
            found[name]["left"] = json.loads(left.read_text(encoding="utf-8")) if left.exists() else None
        _write(found, options.out)
    print(f"wrote {path} and gpu.md")
    return int(any(part["ended"] for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
