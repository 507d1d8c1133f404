"""What a plan says of itself: on the terminal, as a page, as a picture, and after it was saved."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from shardrec.errors import PlanError
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.planner import TableLoad, explain, plan_tables, to_html, to_png
from shardrec.planner.report.content import headline
from shardrec.planner.report.html import page

LOADS = {
    "ads <&> news": TableLoad(num_embeddings=10**6, embedding_dim=64, poolings=(10.0,)),
    "users": TableLoad(num_embeddings=10**5, embedding_dim=32),
    "days": TableLoad(num_embeddings=7, embedding_dim=8),
}
PLAN = plan_tables(LOADS, Topology(ranks_per_host=2).with_machine("h100"), batch_size=512)
BY_HAND = ShardingPlan(topology=Topology(ranks_per_host=2), tables=(cuts.table_wise("t", 10, 8, rank=1),))


class Page(HTMLParser):
    """Counts tags and checks that each is closed; keeps the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.links: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]
        self.open += [tag] if tag not in ("meta", "img") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("plan", [PLAN, BY_HAND], ids=["planned", "by hand"])
def test_the_page_is_well_formed_and_loads_nothing(plan: ShardingPlan, tmp_path: Path) -> None:
    to_html(plan, tmp_path / "plan.html")
    found = Page()
    found.feed((tmp_path / "plan.html").read_text(encoding="utf-8"))
    assert found.open == []
    (link,) = found.links
    kind, _, data = link.partition(",")
    assert kind == "data:image/png;base64"
    assert b64decode(data).startswith(b"\x89PNG")
    assert found.seen["tr"] == 1 + len(plan.tables)
    for table in plan.tables:
        assert table.name in found.text


def test_the_page_says_what_the_report_says() -> None:
    found = Page()
    found.feed(page(PLAN))
    assert PLAN.report is not None
    assert f"{PLAN.report.cost_ms:,.3f} ms" in found.text
    assert f"{PLAN.report.bound_ms:,.3f} ms" in found.text
    for each in PLAN.report.tables:
        assert each.reason in found.text


@pytest.mark.parametrize("plan", [PLAN, BY_HAND], ids=["planned", "by hand"])
def test_the_picture_is_one(plan: ShardingPlan, tmp_path: Path) -> None:
    from matplotlib.image import imread

    to_png(plan, tmp_path / "plan.png")
    pixels = imread(tmp_path / "plan.png")
    assert pixels.shape[0] > 300
    assert pixels.min() < pixels.max()


def test_explain() -> None:
    text = io.StringIO()
    Console(file=text, width=220).print(explain(PLAN))
    shown = text.getvalue()
    assert PLAN.report is not None
    for each in PLAN.report.tables:
        assert each.name in shown
        assert each.reason in shown
    assert "Step estimate: " in shown
    assert "of the best plan" in shown or "Proven to be the best plan" in shown
    assert "is the slowest: input" in shown


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_path_of_the_tables_is_shown_once_and_nothing_is_cut_off(width: int) -> None:
    path = "model.sparse_arch.embedding_bag_collection"
    loads = {f"{path}.t_cat_{number}": TableLoad(num_embeddings=10**6, embedding_dim=64) for number in range(3)}
    plan = plan_tables(loads, Topology(ranks_per_host=2), batch_size=512)
    assert plan.report is not None
    text = io.StringIO()
    Console(file=text, width=width).print(explain(plan))
    shown = text.getvalue()
    assert shown.count(path) == 1
    assert "\u2026" not in shown
    words = [*headline(plan.report).split(), *(f"t_cat_{number}" for number in range(3))]
    assert [word for word in words if word not in shown] == []
    assert max(map(len, shown.splitlines())) <= width


@pytest.mark.parametrize("width", [40, 60, 100])
def test_words_of_the_footer_stay_whole(width: int) -> None:
    text = io.StringIO()
    Console(file=text, width=width).print(explain(PLAN, reasons=False))
    assert PLAN.report is not None
    shown = text.getvalue().split()
    assert [word for word in headline(PLAN.report).split() if word not in shown] == []


def test_a_saved_plan_keeps_its_report(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    again = ShardingPlan.load(tmp_path / "plan.json")
    assert (again, again.report, again.fingerprint) == (PLAN, PLAN.report, PLAN.fingerprint)
    assert again.topology.machine == PLAN.topology.machine
    data = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    del data["report"]
    bare = ShardingPlan.from_json(data)
    assert bare.report is None
    assert bare == PLAN, "the report is no part of the plan"
    assert bare.fingerprint == PLAN.fingerprint
    with pytest.raises(PlanError, match="this is not a sharding plan"):
        ShardingPlan.from_json({**data, "report": {"batch_size": 1}})
