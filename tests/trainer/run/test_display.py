"""What the bar of a run shows in terminals of several widths."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from shardrec.trainer.run.display import TerminalDisplay


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_bar_fits_and_shows_whole_numbers(width: int) -> None:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    display = TerminalDisplay(console, total=2_400_000)
    display.advance(2_000_000, seconds=1.0, loss=0.4953, waits=0.25)
    bar = display._progress.get_renderable()
    display.close()
    lines = console.render_lines(bar, pad=False)
    (line,) = ["".join(segment.text for segment in line) for line in lines]
    assert len(line) <= width
    assert "2,000,000/2,400,000" in line
    assert "loss 0.4953  2,000,000 samples/s  0:00 left" in line
    assert ("waits for data 25%" in line) == (width == 140)
