"""Write the charts of the pages from recorded figures: ``python -m docs.make_chart``.

docs/speed.svg is of the tables in benchmarks/, and docs/tutorial.svg of the curve that docs/tutorial.md prints.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
CHART, CURVE = DOCS / "speed.svg", DOCS / "tutorial.svg"
CPU, GPU = (DOCS.parent / "benchmarks" / name / "README.md" for name in ("train", "gpu"))
WIDTH, ROW, LEFT, SCALE = 480, 34, 262, 20
"""Of the picture, in its own units: width, height of a bar with its gap, begin of the bars, length of a ratio of 1."""


class Case(NamedTuple):
    """A bar: its label, the page with the figure, the first cells of the row, and the column of the ratio."""

    label: str
    page: Path
    row: str
    column: int


CASES = (
    Case("CPU, tables, one-hot, row-wise", CPU, "train criteo row_wise | 2 | 4,096", 5),
    Case("CPU, tables, one-hot, table-wise", CPU, "train criteo table_wise | 2 | 4,096", 5),
    Case("CPU, tables, multi-hot, table-wise", CPU, "train multi_hot table_wise | 2 | 4,096", 5),
    Case("CPU, whole DLRM, row-wise", CPU, "dlrm criteo row_wise | 2 | 4,096", 5),
    Case("CPU, whole DLRM, table-wise", CPU, "dlrm criteo table_wise | 2 | 4,096", 5),
    Case("H200, tables, batch 65,536", GPU, "training | 65,536", 3),
    Case("H200, tables, batch 4,096", GPU, "training | 4,096", 3),
    Case("H200, whole DLRM, batch 16,384", GPU, "DLRM | 16,384", 3),
)


def ratio(case: Case) -> float:
    """TorchRec's time divided by shardrec's, as the page of the case has it."""
    lines = case.page.read_text(encoding="utf-8").splitlines()
    row = next(line for line in lines if line.startswith(f"| {case.row} |"))
    return float(re.findall(r"[\d.]+", row.split("|")[case.column + 1])[0])


def _opening(height: int, title: str) -> str:
    font = 'font-family="system-ui, sans-serif" font-size="15"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {font}>\n<title>{title}</title>'


def chart() -> str:
    """The text of docs/speed.svg."""
    height = 58 + ROW * len(CASES)
    one = LEFT + SCALE
    parts = [
        _opening(height, "Time of a training step: TorchRec's divided by shardrec's"),
        "<style>text{fill:#1f2933}.n{font-weight:600}.f{fill:#3b7dd8}.s{fill:#d9822b}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        '<text x="8" y="24" font-weight="600">TorchRec\'s step time / shardrec\'s (dashed: equal)</text>',
    ]
    for place, case in enumerate(CASES):
        value, top = ratio(case), 42 + ROW * place
        length, color = round(SCALE * value), "f" if value >= 1 else "s"
        parts += [
            f'<text x="8" y="{top + 17}">{case.label}</text>',
            f'<rect class="{color}" x="{LEFT}" y="{top}" width="{length}" height="24" rx="3"/>',
            f'<text class="n" x="{LEFT + max(length, SCALE) + 6}" y="{top + 17}">{value:.2f}</text>',
        ]
    parts.append(f'<path stroke="#52606d" stroke-dasharray="4 3" d="M{one} 36V{height - 12}"/></svg>')
    return "\n".join(parts) + "\n"


def curve() -> str:
    """The text of docs/tutorial.svg: held-out NE by samples."""
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    points = re.findall(r"^ *([\d,]+) samples: .* NE ([\d.]+)$", page, re.MULTILINE)
    places = [
        (40 + int(samples.replace(",", "")) / 90_000 * 420, 290 - 200 * (float(entropy) - 0.4))
        for samples, entropy in points
    ]
    line = " ".join(f"{x:.0f},{y:.0f}" for x, y in places)
    best_x, best_y = max(places, key=lambda place: place[1])
    return f"""{_opening(300, "Held-out normalized entropy of the tutorial's model")}
<rect width="480" height="300" fill="#ffffff"/>
<text x="8" y="24" font-weight="600">Held-out normalized entropy</text>
<path d="M40 170H470" stroke="#52606d" stroke-dasharray="4 3"/><text x="8" y="175">1.0</text>
<text x="44" y="162" fill="#52606d">the click rate alone</text>
<path d="M40 260H470" stroke="#9aa5b1"/><text x="470" y="284" text-anchor="end">90,000 samples</text>
<polyline points="{line}" fill="none" stroke="#3b7dd8" stroke-width="2.5"/>
<circle cx="{best_x:.0f}" cy="{best_y:.0f}" r="6" fill="#d9822b"/>
<text x="{best_x:.0f}" y="{best_y + 24:.0f}" text-anchor="middle">kept: the best</text>
</svg>
"""


if __name__ == "__main__":
    CHART.write_text(chart(), encoding="utf-8")
    CURVE.write_text(curve(), encoding="utf-8")
