"""One GPU, measured by one command: ``make gpu``, or ``python -m benchmarks.gpu.main``.

::

    ceilings   copies, random rows, launches (benchmarks/gpu/ceilings.py)
    doctor     versions, device, driver, NCCL through the exchange's code, a training lookup, a scripted one
    edges      small steps on empty batches, unused and repeated keys, under compute-sanitizer (benchmarks/gpu/edges.py)
    tests      those that need a CUDA device
    timings    shardrec bench --preset gpu: shardrec, TorchRec and bare kernels in turn
    variants   sequences, pipelines, row blocks, Adam, FP16 (benchmarks/gpu/variants.py)
    two_ranks  two NCCL ranks on one device: parity, empty exchanges, a rank that fails (benchmarks/gpu/two_ranks.py)
    programs   eager, compiled, as a CUDA graph, profiled (benchmarks/gpu/programs.py)
    tests_two  the tests that need two ranks, which share the device

Each part is a process of its own with a time limit. What it prints goes at once to a file of its name, and what it
measures to its own JSON. ``gpu.json`` and ``gpu.md`` are written anew after each part. ``--minutes`` ends the whole
call in time. ``--resume`` goes on: it leaves out the parts that are done, and of the others the tests that passed, the
rounds that are timed and the programs that have run. ``--call`` runs the parts of one of the five calls of README.md,
in nine minutes. ``--libraries`` unpacks what ``benchmarks.gpu.pack`` has packed, once, for the parts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import os
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["CALLS", "commands", "main", "new_parser", "page"]

_ROOT = Path(__file__).resolve().parents[2]
_TAIL = 4000
_CUDA_TESTS = (
    "tests/modules/test_cuda.py",
    "tests/compile/test_cuda.py",
    "tests/parity/test_collections.py::test_on_cuda",
    "tests/checkpoint/test_save.py::test_on_cuda",
    "tests/checkpoint/test_reshard.py::test_on_cuda",
    "tests/serve/test_publish.py::test_on_cuda",
    "tests/serve/test_quantize.py::test_on_cuda",
    "tests/replicas/test_elastic.py::test_on_cuda_one_that_comes_back_has_the_other_s_state",
    "tests/lookup/test_group_shards.py::test_a_fused_bank_on_cuda_learns_as_rows_do_on_the_cpu",
    "tests/pipeline/test_pipeline.py::test_stages_on_a_gpu",
    "tests/pipeline/test_train.py::test_on_a_gpu_losses_are_the_plain_loop_s",
    "tests/pipeline/test_timeline.py::test_on_a_gpu_spans_are_those_of_its_work_and_not_of_the_host_s",
    "tests/exchange/test_input_kernels.py",
    "tests/ids/test_device_maps.py",
    "tests/modules/test_cuda_double.py",
    "tests/pipeline/test_cuda_double.py",
)


_OF_TWO = 8  # the first of them have tests of two ranks


CALLS = {
    1: ("ceilings", "doctor", "edges"),
    2: ("tests",),
    3: ("timings",),
    4: ("variants",),
    5: ("two_ranks", "programs", "tests_two"),
}
"""The parts of the five calls of README.md."""

_CALL_MINUTES = 9.0
_ENVIRONMENTS = {"tests_two": {"SHARDREC_SHARE_DEVICES": "1"}}  # which importing shardrec's name would need torch for


def commands(options: argparse.Namespace) -> dict[str, tuple[list[str], float]]:
    """Of each part, the arguments of Python and the minutes that it may take."""
    out, device = options.out, ["--device", options.device]
    sizes = ["--max-rows", str(options.max_rows)]
    batch = ["--batch", str(options.batch)] if options.batch else []
    timings = [*device, *sizes, *batch, "--nproc", "1", "--resume", "--out", str(out / "timings")]
    timings += ["--rounds", str(options.rounds), "--steps", str(options.steps), "--seconds", "5"]
    timings += ["--minutes", str(_TIMINGS_MINUTES)]
    again = [*device, *sizes, *batch, "--steps", str(options.steps), "--resume"]
    variants = [*again, "--rounds", str(options.rounds), "--out", str(out / "variants.json")]
    tests = ["-v", "-n", "4", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.unpassed", "-m", ""]
    return {
        "ceilings": (["-m", "benchmarks.gpu.ceilings", *device, "--out", str(out / "ceilings.json")], 2),
        "doctor": (["-m", "shardrec.trainer.cli", "doctor", *device], 5),
        "edges": (["-m", "benchmarks.gpu.edges", *device, "--sanitize"], 6),
        "tests": (["-m", "pytest", *tests, *_CUDA_TESTS], 10),
        "timings": (["-m", "shardrec.trainer.cli", "bench", "--preset", "gpu", *timings], _TIMINGS_MINUTES + 4),
        "variants": (["-m", "benchmarks.gpu.variants", *variants], 10),
        "two_ranks": (["-m", "benchmarks.gpu.two_ranks", *device, "--out", str(out / "two_ranks.json")], 4),
        "programs": (["-m", "benchmarks.gpu.programs", *again, "--out", str(out / "programs.json")], 10),
        "tests_two": (["-m", "pytest", *tests, *_CUDA_TESTS[:_OF_TWO]], 10),
    }


def _passed(out: Path) -> Path:
    """Write a file with the tests that an earlier call has run without a failure."""
    passed = out / "passed.txt"
    lines = [line for path in out.glob("tests*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    found = [test for line in lines for test in re.findall(r"PASSED (\S+::.*\S)", line)]
    passed.write_text("\n".join(found), encoding="utf-8")
    return passed


_TIMINGS_MINUTES = 8
_FEWEST_MINUTES = 0.2  # of a part that is still begun

_LEFT = {"timings": "timings/timings.json"} | {
    name: f"{name}.json" for name in ("ceilings", "variants", "two_ranks", "programs")
}
"""Files that parts leave."""


def _unpacked(parts: Path) -> Path:
    """The folder of what ``benchmarks.gpu.pack`` has packed. It is made once."""
    site = Path(tempfile.gettempdir()) / "shardrec-libraries"
    whole = site / "whole.txt"
    names = [f"{path.name} {path.stat().st_size}" for path in sorted(parts.glob("libraries.tar.xz.*"))]
    if not names:
        raise SystemExit(f"--libraries {parts} has no libraries.tar.xz.000: see benchmarks/gpu/README.md")
    if not whole.exists() or whole.read_text(encoding="utf-8").splitlines() != names:
        begin = time.monotonic()
        joined = subprocess.Popen(["cat", *(str(parts / one.split()[0]) for one in names)], stdout=subprocess.PIPE)
        assert joined.stdout is not None, "it is a pipe"
        # Not tarfile's own "r|xz", which copies all that a few bytes expand to, again and again: zeros are many.
        with lzma.open(joined.stdout) as packed, tarfile.open(fileobj=packed, mode="r|") as archive:
            archive.extractall(site, filter="data")
        joined.wait()
        whole.write_text("\n".join(names), encoding="utf-8")
        print(f"unpacked {len(names)} files in {time.monotonic() - begin:.0f} s", flush=True)
    return site


def _run(
    arguments: Sequence[str], minutes: float, printed: Path, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a part. What it prints is shown, and added to a file, line by line."""
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-u", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "SHARDREC_PASSED": str(_passed(printed.parent)), **(environment or {})},
    )
    output = process.stdout
    assert output is not None, "it is a pipe"

    def copy() -> None:
        with printed.open("a", encoding="utf-8", buffering=1) as file:
            for line in output:
                print(line, end="", flush=True)
                file.write(line)

    copying = threading.Thread(target=copy)
    copying.start()
    try:
        process.wait(60 * minutes)
        ended = f"ended with {process.returncode}" if process.returncode else ""
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()
        ended = f"was stopped after {minutes:.3g} minutes"
    copying.join()
    text = printed.read_text(encoding="utf-8")
    return {"ended": ended, "seconds": round(time.monotonic() - begin, 1), "printed": text[-_TAIL:]}


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
    for name in ("ceilings", "doctor", "edges", "tests", "two_ranks", "tests_two"):
        if name in found:
            yield from ("", f"## {name}", "", "```", found[name]["printed"].strip(), "```")
    if "timings" in found:
        yield from ("", "## Steps", "", *_timings(found["timings"].get("left") or {}))
    if "variants" in found:
        yield from ("", "## Variants of a step, in milliseconds by round", "")
        for name, values in (found["variants"].get("left") or {}).items():
            yield f"- {name}: {json.dumps(values)}"
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


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parts = [part for call in CALLS.values() for part in call]
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--parts", nargs="+", default=parts, choices=parts)
    chosen.add_argument("--call", type=int, choices=list(CALLS), help=f"its parts, in {_CALL_MINUTES:g} minutes")
    parser.add_argument("--libraries", type=Path, help="folder of what benchmarks.gpu.pack has packed")
    parser.add_argument("--max-rows", type=int, default=1_000_000, help="most rows of a table: what the memory holds")
    parser.add_argument("--batch", type=int, help="only this batch size")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200, help="of a turn, after half a second to warm up")
    parser.add_argument("--minutes", type=float, help="of all the parts; default: each has its own limit")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"))
    parser.add_argument("--resume", action="store_true")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; 1 if any was not whole."""
    options = new_parser().parse_args(arguments)
    if options.call:
        options.parts = CALLS[options.call]
        options.minutes = options.minutes or _CALL_MINUTES
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "gpu.json"
    kept = (options.resume or options.call) and path.exists()
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if kept else {}
    if not options.resume:
        found = {name: part for name, part in found.items() if name not in options.parts}
    end = time.monotonic() + 60 * (options.minutes or math.inf)
    libraries: dict[str, str] = {}
    if options.libraries is not None:
        folders = [str(_unpacked(options.libraries)), os.environ.get("PYTHONPATH", "")]
        libraries["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    for name in () if options.resume else options.parts:
        for file in (f"{name}.txt", _LEFT.get(name, f"{name}.txt")):
            (options.out / file).unlink(missing_ok=True)
    for name, (command, minutes) in commands(options).items():
        if name not in options.parts or (name in found and not found[name]["ended"]):
            continue
        left_over = (end - time.monotonic()) / 60
        if left_over < _FEWEST_MINUTES:
            found[name] = {"ended": "was not begun", "seconds": 0.0, "printed": ""} | found.get(name, {})
            _write(found, options.out)
            continue
        print(f"==> {name}", flush=True)
        left = options.out / _LEFT[name] if name in _LEFT else None
        environment = libraries | _ENVIRONMENTS.get(name, {})
        found[name] = _run(command, min(minutes, left_over), options.out / f"{name}.txt", environment)
        if left is not None:
            found[name]["left"] = json.loads(left.read_text(encoding="utf-8")) if left.exists() else None
        _write(found, options.out)
    print(f"wrote {path} and gpu.md")
    return int(any(part["ended"] for part in found.values()))


if __name__ == "__main__":
    sys.exit(main())
