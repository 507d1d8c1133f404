"""The plan's page in a headless browser: its script runs, its columns sort, its picture is shown.

Skips without Chromium or Chrome. ``SHARDREC_BROWSER`` names one that is not on the path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from typing import Any

import pytest

from shardrec.layout import Topology
from shardrec.planner import TableLoad, plan_tables, to_html

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOADS = {
    "ads <&> news": TableLoad(num_embeddings=10**6, embedding_dim=64, poolings=(10.0,)),
    "users": TableLoad(num_embeddings=10**5, embedding_dim=32),
    "days": TableLoad(num_embeddings=7, embedding_dim=8),
}
PLAN = plan_tables(LOADS, Topology(ranks_per_host=2).with_machine("h100"), batch_size=512)

# Runs in the page: what a reader would see and do. A fault in any script lands in `errors`.
PROBE = """
<script>
const found = {sorted: {}, errors: window.faults};
const heads = [...document.querySelectorAll("th")];
const column = (head) => [...document.querySelectorAll("tbody tr")].map((row) => row.cells[head.cellIndex].textContent);
for (const head of heads) {
  const shown = [];
  for (const press of [1, 2]) {
    head.querySelector("button").click();
    shown.push([head.getAttribute("aria-sort"), column(head)]);
  }
  found.sorted[head.textContent] = shown;
}
found.marked = heads.filter((head) => head.hasAttribute("aria-sort")).map((head) => head.textContent);
const picture = document.querySelector("img");
found.picture = {alt: picture.alt, width: picture.naturalWidth};
found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
const told = document.createElement("pre");
told.id = "told";
told.textContent = JSON.stringify(found);
document.body.append(told);
</script>
"""
LISTENER = (
    '<script>window.faults = []. AddEventListener("error", (event) => window.faults.push(event.message));</script>'
)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the probe saw in the page."""
    named = os.environ.get("SHARDREC_BROWSER")
    browser = named or next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        pytest.skip("no Chromium or Chrome on the path; SHARDREC_BROWSER may name one")
    folder = tmp_path_factory.mktemp("page")
    to_html(PLAN, folder / "plan.html")
    text = (folder / "plan.html").read_text(encoding="utf-8")
    probed = text.replace("<head>", "<head>" + LISTENER, 1).replace("</body>", PROBE + "</body>", 1)
    (folder / "probed.html").write_text(probed, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    page = (folder / "probed.html").as_uri()
    done = subprocess.run(
        [browser, *options, page], capture_output=True, text=True, timeout=120, check=True, cwd=folder
    )
    told = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert told is not None, f"the page's script did not end: {done.stderr[-2000:]}"
    result: dict[str, Any] = json.loads(unescape(told.group(1)))
    return result


def test_scripts_run_and_nothing_is_loaded(seen: dict[str, Any]) -> None:
    assert seen["errors"] == []
    assert [name for name in seen["resources"] if not name.startswith("data:")] == []


def test_every_column_sorts_both_ways(seen: dict[str, Any]) -> None:
    assert list(seen["sorted"]) == [
        *("table", "rows", "dim", "MiB", "cut", "ranks", "ms, all ranks", "next-best cut", "why it lost"),
    ]
    for name, ((first, up), (second, down)) in seen["sorted"].items():
        assert (first, second) == ("ascending", "descending"), name
        assert down == up[::-1] or len(set(up)) < len(up), name
    rows = [int(text.replace(",", "")) for text in seen["sorted"]["rows"][0][1]]
    assert rows == [7, 10**5, 10**6], "numbers are not sorted as text"
    assert set(seen["sorted"]["table"][0][1]) == set(LOADS)
    assert seen["marked"] == ["why it lost"], "one column is marked as the sorted one"


def test_the_picture_is_shown(seen: dict[str, Any]) -> None:
    assert seen["picture"]["alt"] == "Time per rank in a step. Memory per rank"
    assert seen["picture"]["width"] > 300
