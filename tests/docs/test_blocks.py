"""The Python blocks of the pages: run, with the names that a page takes for granted; or, where they need more processes
or devices, compiled, and what they import from shardrec is there."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

import shardrec
from shardrec.trainer.data import Feature, FeatureSpec, batch_of_request

ROOT = Path(__file__).parents[2]
WHOLE = {"docs/guide.md", "docs/tutorial.md"}
"""Pages with a test of their own."""
RUN = {"README.md": [0], "docs/checkpoints.md": [0], "docs/pipelines.md": [0, 2], "docs/planner.md": [0]}
"""Blocks that run on one rank, by number."""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def pages() -> list[str]:
    names = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
    return [name for name in names if name not in WHOLE and blocks(name)]


class MyModel(nn.Module):
    """Takes a batch, or its parts."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(name="t", num_embeddings=50, embedding_dim=4, feature_names=["f"])]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.top = nn.Linear(4, 1)

    def forward(self, x: Any, kjt: KeyedJaggedTensor | None = None) -> Tensor:
        return self.top(self.bags(x.kjt if kjt is None else kjt).values()).squeeze(1)


class Batch(SimpleNamespace):
    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self


def batches() -> list[Batch]:
    kjt = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    return [Batch(x=torch.ones(2, 3), kjt=kjt, y=torch.ones(2)) for _ in range(3)]


def names_of(page: str) -> dict[str, Any]:
    """What a block of the page takes for granted."""
    unsharded = MyModel()
    plan = shardrec.plan(unsharded)
    sharded = shardrec.shard(MyModel(), plan)
    names: dict[str, Any] = {"shardrec": shardrec, "torch": torch, "nn": nn, "MyModel": MyModel, "plan": plan}
    names |= {"batch": batches()[0], "epoch": 0, "loader": batches(), "held_out": batches()}
    names |= {"model": unsharded if page == "docs/planner.md" else sharded, "rich": importlib.import_module("rich")}
    names |= {"criterion": nn.functional.mse_loss, "Middle": nn.Identity}
    names["optimizer"] = torch.optim.SGD(sharded.parameters(), lr=0.1)
    return names


def runs() -> list[tuple[str, int]]:
    return [(page, number) for page, numbers in RUN.items() for number in numbers]


@pytest.mark.parametrize(("page", "number"), runs())
def test_a_block_runs(page: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks(page)[number], f"{page}, block {number}", "exec"), names_of(page))


@pytest.mark.parametrize("page", pages())
def test_what_a_block_names_is_there(page: str) -> None:
    for text in blocks(page):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardrec"):
                module = importlib.import_module(str(node.module))
                assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shardrec":
                assert hasattr(shardrec, node.attr), node.attr


def test_the_rows_of_ids_that_a_program_without_shardrec_computes() -> None:
    names: dict[str, Any] = {}
    exec(blocks("docs/serving.md")[0], names)
    ids = [
        "",
        "a",
        "user-17",
        "Artist № 3",
        "7",
        "-7",
        "07",
        "+7",
        "-0",
        "0",
        "7.5",
        "7.0",
        "-70.",
        "-0.00",
        "07.0",
        "1.10",
        str(2**64 - 1),
        str(2**64),
        "-" + "9" * 19,
    ]
    for rows in (2, 97, 2**31 - 1):
        spec = FeatureSpec(features=(Feature(name="f", kind="id", rows=rows),))
        found = batch_of_request([{"f": one} for one in ids], spec).sparse.values().tolist()
        assert [names["row_of"](one, rows) for one in ids] == found
