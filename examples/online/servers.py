"""The producer, and three servers that score each file before the trainer has it."""

from __future__ import annotations

import json
import math
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from examples.online.clicks import Clicks
from shardrec.serve import ServedModel
from shardrec.trainer.data import area_under_roc, load_spec, open_click_data
from shardrec.trainer.run import RunFolder

__all__ = ["serve"]

_START_S = 180.0
_SMOOTHED = 5
_STYLES = {
    "best possible": {"color": "tab:green", "linestyle": ":"},
    "trainer": {"color": "black", "linestyle": "--"},
    "deltas": {"color": "tab:blue"},
    "full exports": {"color": "tab:orange"},
    "frozen": {"color": "tab:red"},
}


def serve(
    out: Path, trainer: subprocess.Popen[bytes], *, seconds: int, rows: int, warm_up: int, export_s: int, seed: int
) -> dict[str, float]:
    """Write files and score them, and wait for the trainer's end.

    :func:`examples.online.main.run` describes the arguments.
    """
    incoming, published, run_folder = (out / name for name in ("incoming", "published", "run"))
    clicks = Clicks(rows, seed)
    for number in range(warm_up):
        _deliver(_written(incoming, clicks, number, 0.0)[0])
    servers = _servers(run_folder, published, trainer, version_of_steps=warm_up * rows // 512)
    aucs: dict[str, list[float]] = {name: [] for name in ("best possible", *servers)}
    begin = time.monotonic()
    for second in range(seconds):
        time.sleep(max(0.0, begin + second - time.monotonic()))
        hidden, probabilities = _written(incoming, clicks, warm_up + second, math.radians(90 * second / 60))
        if second and second % export_s == 0:
            servers["full exports"].follower.poll()
        labels, scores = _scored(hidden, out / "features.yaml", servers)
        for name, values in {"best possible": probabilities, **scores}.items():
            aucs[name].append(area_under_roc(labels, values))
        _deliver(hidden)
    if trainer.wait(_START_S):
        raise SystemExit(f"the trainer failed; {out / 'trainer.log'} says why")
    curve = RunFolder(run_folder).metrics["curve"]
    aucs["trainer"] = [point["auc"] for point in curve][warm_up - 1 : warm_up - 1 + seconds]  # the first file lacks it
    _draw(aucs, out / "online.png")
    means = {name: float(np.mean(values)) for name, values in aucs.items()}
    (out / "online.json").write_text(json.dumps({"means": means, "aucs": aucs}, indent=1) + "\n", encoding="utf-8")
    return means


def _servers(
    run_folder: Path, published: Path, trainer: subprocess.Popen[bytes], version_of_steps: int
) -> dict[str, ServedModel]:
    """Three served models with the weights after the warm-up. The first continues to follow by itself."""
    give_up = time.monotonic() + _START_S
    servers: dict[str, ServedModel] = {}
    while time.monotonic() < give_up and trainer.poll() is None:
        time.sleep(0.2)
        if not servers and any(published.glob("version-*")):
            servers = {
                name: RunFolder(run_folder).following(str(published)) for name in ("deltas", "full exports", "frozen")
            }
            for name in ("full exports", "frozen"):
                servers[name].follower.close()
        if servers and servers["deltas"].follower.extra.get("step", 0) >= version_of_steps:
            servers["full exports"].follower.poll()
            servers["frozen"].follower.poll()
            return servers
    raise SystemExit(f"nothing was published; {run_folder.parent / 'trainer.log'} says why")


def _written(incoming: Path, clicks: Clicks, number: int, angle: float) -> tuple[Path, NDArray[np.float64]]:
    hidden = incoming / f".{number:06}.parquet"
    return hidden, clicks.write(hidden, number, angle)


def _deliver(hidden: Path) -> None:
    hidden.rename(hidden.with_name(hidden.name[1:]))


def _scored(
    file: Path, features: Path, servers: Mapping[str, ServedModel]
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """The labels of a file's rows, and the scores of each server, (rows,)."""
    data = open_click_data(file, load_spec(features), holdout=0.0)
    (batch,) = data.train_batches(0, 1, data.train_rows)
    with torch.no_grad():
        scores = {name: server(batch.dense, batch.sparse).view(-1).numpy() for name, server in servers.items()}
    return batch.labels.numpy(), scores


def _draw(aucs: Mapping[str, Sequence[float]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, style in _STYLES.items():
        smooth = np.convolve(aucs[name], np.ones(_SMOOTHED) / _SMOOTHED, "valid")
        axes.plot(np.arange(len(smooth)) + _SMOOTHED / 2, smooth, label=f"{name} {np.mean(aucs[name]):.4f}", **style)
    axes.set(xlabel="seconds", ylabel=f"AUC, mean over {_SMOOTHED} s", title="AUC of clicks that drift")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower left")
    FigureCanvasAgg(figure).print_figure(path, dpi=120)
