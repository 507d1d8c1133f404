"""A plan as one self-contained page: its picture, a few lines of script for sorting, nothing loaded from elsewhere."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from shardrec.planner.report.content import Column, content
from shardrec.planner.report.png import picture

if TYPE_CHECKING:
    from shardrec.layout.plan import ShardingPlan

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --line: #8884; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 72rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; }
.scroll { overflow-x: auto; } img { max-width: 100%; margin-top: 1rem; }
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
    titles = ". ".join(chart.title for chart in shown.charts)
    parts.append(f'<img alt="{escape(titles)}" src="data:image/png;base64,{b64encode(picture(shown)).decode()}">')
    parts.append(f"<h2>Tables</h2><div class='scroll'>{_tables(shown.columns)}</div>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(shown.title)}</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{_SCRIPT}</script>\n</body></html>\n"
    )


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
