"""A plan as one self-contained page: inline SVG, a few lines of script for sorting, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardrec.planner.report.content import COLOURS, Chart, Column, content

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan

__all__ = ["page", "to_html"]

_HEIGHT, _LEFT, _TOP = 220, 64, 12

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --line: #8884; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; }
.scroll { overflow-x: auto; }
svg text { fill: var(--ink); font-size: 11px; } svg .grid { stroke: var(--line); } svg .mark { stroke: var(--ink);
  stroke-dasharray: 5 4; }
.legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em;
  margin-right: .35em; border-radius: 2px; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top;
  white-space: nowrap; }
td.number, th.number { text-align: right; }
th button { all: unset; cursor: pointer; font-weight: 600; } th button:focus-visible { outline: 2px solid; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
"""

_SCRIPT = """
document.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const column = head.cellIndex, up = head.getAttribute("aria-sort") !== "ascending";
  const number = head.classList.contains("number");
  const key = (row) => number ? row.cells[column].textContent.replaceAll(",", "") : row.cells[column].textContent;
  const rows = [...body.rows].sort((a, b) => number ? key(a) - key(b) : key(a).localeCompare(key(b)));
  head.parentNode.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  body.append(...(up ? rows : rows.reverse()));
}));
"""


def to_html(plan: ShardingPlan, path: str | Path) -> None:
    """Write a plan as one self-contained page: load and memory per rank, and a table of tables that can be sorted.

    Args:
        plan: any plan.
        path: of the file.
    """
    Path(path).write_text(page(plan), encoding="utf-8")


def page(plan: ShardingPlan) -> str:
    """The page of a plan."""
    shown = content(plan)
    parts = [f"<h1>{escape(shown.title)}</h1>", *(f"<p>{escape(fact)}</p>" for fact in shown.facts)]
    for chart in shown.charts:
        parts.append(f"<h2>{escape(chart.title)}</h2>{_legend(chart)}<div class='scroll'>{_svg(chart)}</div>")
    parts.append(f"<h2>Tables</h2><div class='scroll'>{_tables(shown.columns)}</div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(shown.title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


def _legend(chart: Chart) -> str:
    shown = [
        f'<span><i style="background:{COLOURS[part % len(COLOURS)]}"></i>{escape(name)}</span>'
        for part, name in enumerate(chart.names)
        if any(bar[part] for bar in chart.bars)
    ]
    shown += [f"<span>- - {escape(name)}: {value:,.3f} {chart.unit}</span>" for name, value in chart.lines]
    return f'<p class="legend">{"".join(shown)}</p>'


def _svg(chart: Chart) -> str:
    step = max(9.0, min(60.0, 980.0 / len(chart.bars)))
    width, height = _LEFT + step * len(chart.bars) + 10, _HEIGHT + _TOP + 24
    scale = _HEIGHT / (chart.top * 1.05)
    base = _TOP + _HEIGHT
    parts = []
    for value in _ticks(chart):
        y = base - value * scale
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g} {chart.unit}</text>')
    label_spacing = max(1, -(-len(chart.bars) // 32))
    for rank, bar in enumerate(chart.bars):
        x, y = _LEFT + rank * step + step * 0.1, base
        for part, value in enumerate(bar):
            tall = value * scale
            if tall > 0:
                y -= tall
                parts.append(
                    f'<rect x="{x:.1f}" y="{y:.2f}" width="{step * 0.8:.1f}" height="{tall:.2f}" '
                    f'fill="{COLOURS[part % len(COLOURS)]}"><title>rank {rank}, {escape(chart.names[part])}: '
                    f"{value:,.4g} {chart.unit} of {sum(bar):,.4g}</title></rect>"
                )
        if rank % label_spacing == 0:
            parts.append(f'<text x="{x + step * 0.4:.1f}" y="{base + 15}" text-anchor="middle">{rank}</text>')
    for _, value in chart.lines:
        y = base - value * scale
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{width:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
    return (
        f'<svg role="img" aria-label="{escape(chart.title)}" width="{width:.0f}" height="{height}" '
        f'viewBox="0 0 {width:.0f} {height}">{"".join(parts)}</svg>'
    )


def _ticks(chart: Chart) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    return [float(value) for value in MaxNLocator(5).tick_values(0, chart.top) if value <= chart.top * 1.05]


def _tables(columns: Sequence[Column]) -> str:
    kinds = [" class=number" * column.is_number for column in columns]
    head = "".join(
        f'<th{kind}><button type="button">{column.name}</button></th>'
        for kind, column in zip(kinds, columns, strict=True)
    )
    rows = (
        "".join(f"<td{kind}>{escape(cell)}</td>" for kind, cell in zip(kinds, cells, strict=True))
        for cells in zip(*(column.cells for column in columns), strict=True)
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
