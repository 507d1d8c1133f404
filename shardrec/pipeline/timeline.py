"""When each stage computed and when it waited, in one step: as a Chrome trace, and as a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from shardrec.errors import PipelineError
from shardrec.pipeline.schedule import Action


@dataclass(frozen=True, kw_only=True)
class Span:
    """A span of a stage's time.

    Args:
        stage: its number. name: the action, such as ``"F0"``.
        kind: ``"compute"``. ``"wait"``, for messages. ``"send"``, a message on its way to another rank.
        start: time in seconds of the host's clock.
        end: on the same clock.
    """

    stage: int
    name: str
    kind: str
    start: float
    end: float


class Recorder:
    """Collects spans, also from several threads.

    Attributes:
        spans: so far. Those of CUDA devices come with :meth:`finish`.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._marked: list[tuple[int, str, str, torch.device, torch.cuda.Event, torch.cuda.Event]] = []
        self._origins: dict[torch.device, tuple[float, torch.cuda.Event]] = {}

    @contextmanager
    def span(self, stage: int, action: Action | str, kind: str, device: torch.device | None = None) -> Iterator[None]:
        """Note how long the block takes. On a CUDA device, how long its work on the current stream takes."""
        gpu = device if device is not None and device.type == "cuda" else None
        first = None if gpu is None else self._mark(gpu)
        start = time.time()
        try:
            yield
        finally:
            if gpu is None or first is None:
                self.spans.append(Span(stage=stage, name=str(action), kind=kind, start=start, end=time.time()))
            else:
                self._marked.append((stage, str(action), kind, gpu, first, self._mark(gpu)))

    def finish(self) -> None:
        """Wait for the issued work, and note when it was done."""
        for stage, name, kind, device, first, last in self._marked:
            torch.cuda.synchronize(device)
            zero, origin = self._origins[device]
            start, end = (zero + 1e-3 * origin.elapsed_time(event) for event in (first, last))
            self.spans.append(Span(stage=stage, name=name, kind=kind, start=start, end=end))
        self._marked.clear()

    def _mark(self, device: torch.device) -> torch.cuda.Event:
        stream = torch.cuda.current_stream(device)
        if device not in self._origins:
            origin = stream.record_event(torch.cuda.Event(enable_timing=True))
            origin.synchronize()
            self._origins[device] = time.time(), origin
        event: torch.cuda.Event = stream.record_event(torch.cuda.Event(enable_timing=True))
        return event


@dataclass(frozen=True)
class Timeline:
    """The spans of a step, of all stages.

    Args:
        spans: in any order.

    Raises:
        PipelineError: by each method, if there are no spans.
    """

    spans: list[Span]

    @property
    def seconds(self) -> float:
        """From the first start to the last end of a computation."""
        computed = self._computed()
        return max(span.end for span in computed) - min(span.start for span in computed)

    @property
    def idle_share(self) -> float:
        """Share of the stages' time in which they compute nothing.

        Both schedules, of S stages and M micro-batches, leave (S - 1) / (M + S - 1).
        """
        computed = self._computed()
        stages = len({span.stage for span in computed})
        return 1 - sum(span.end - span.start for span in computed) / (stages * self.seconds)

    def save_trace(self, path: str | Path) -> None:
        """Write a trace for chrome://tracing or Perfetto: a process per stage."""
        begin = min(span.start for span in self._recorded())
        lanes = {"compute": 0, "wait": 1, "send": 2}
        events = [
            {
                "name": f"{span.kind} {span.name}" if span.kind != "compute" else span.name,
                "cat": span.kind,
                "ph": "X",
                "pid": span.stage,
                "tid": lanes[span.kind],
                "ts": 1e6 * (span.start - begin),
                "dur": 1e6 * (span.end - span.start),
            }
            for span in self.spans
        ]
        stages = sorted({span.stage for span in self.spans})
        events += [
            {"name": "process_name", "ph": "M", "pid": stage, "args": {"name": f"stage {stage}"}} for stage in stages
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def save_png(self, path: str | Path) -> None:
        """Draw a line per stage: forwards, backwards, waits, and messages on their way below."""
        from matplotlib.figure import Figure

        begin = min(span.start for span in self._recorded())
        stages = sorted({span.stage for span in self.spans})
        figure = Figure(figsize=(10, 1 + 0.6 * len(stages)), layout="constrained")
        axes = figure.add_subplot()
        colours = {"F": "#4c78a8", "B": "#f58518"}
        for span in self.spans:
            left, width = 1e3 * (span.start - begin), 1e3 * (span.end - span.start)
            if span.kind == "compute":
                axes.barh(span.stage, width, left=left, height=0.6, color=colours[span.name[0]], edgecolor="white")
                axes.text(left + width / 2, span.stage, span.name, ha="center", va="center", fontsize=7, clip_on=True)
            elif span.kind == "wait":
                axes.barh(span.stage, width, left=left, height=0.15, color="#d9d9d9")
            else:
                axes.barh(span.stage + 0.4, width, left=left, height=0.1, color="#54a24b")
        axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
        axes.invert_yaxis()
        axes.set_xlabel("ms (blue forward, orange backward, grey wait, green sending)")
        figure.savefig(path, dpi=120)

    def _recorded(self) -> list[Span]:
        if not self.spans:
            raise PipelineError(
                "nothing was recorded: run a step inside the block of Pipeline.record(), and read the timeline after it"
            )
        return self.spans

    def _computed(self) -> list[Span]:
        return [span for span in self._recorded() if span.kind == "compute"]
