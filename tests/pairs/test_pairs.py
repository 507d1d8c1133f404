"""Each pair of features trains as the unsharded model does, or is refused by name before anything changes."""

from __future__ import annotations

import os
import random
import time
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pairs.axes import AXES, Row, covering, has
from tests.pairs.refused import LEFT_OUT, REFUSED, Refused, table
from tests.pairs.rows import run_row
from tests.ranks import RankErrors, ranks

PAGE = Path(__file__).parents[2] / "docs/ledger.md"
LIMIT_S = 120.0
"""Of a row, in seconds; a row takes less than 10, and more where it compiles."""
FORBIDDEN = [*(each.values for each in REFUSED), *LEFT_OUT]
SEED = "SHARDREC_PAIRS_SEED"
"""The variable that has the seed of the rows of strength three, to draw them again."""


@pytest.fixture(scope="module")
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def outcome(row: Row, folder: Path, port: int) -> list[str]:
    """What went wrong on a rank, or how it was refused."""
    folder.mkdir()
    address = f"127.0.0.1:{port}/{folder.name}-{time.time()}"
    size = 4 if row.mode == "servers" else 2  # two of which are the servers
    of_ranks = ranks(size, run_row, row, folder, address, timeout=LIMIT_S)
    return next((faults for faults in of_ranks if faults), [])


def marks(row: Row) -> Any:
    """A compiler takes seconds for a model."""
    return pytest.mark.slow if row.executor == "traced" else ()


def parameters() -> list[Any]:
    """The rows of strength two."""
    return [pytest.param(row, marks=marks(row), id=str(row)) for row in covering(2, 0, FORBIDDEN)]


@pytest.mark.some(16)
@pytest.mark.parametrize("row", parameters())
def test_a_row(row: Row, tmp_path: Path, store: Any) -> None:
    assert not outcome(row, tmp_path / "row", store.port)


ONCE_WRONG = (
    Row(mode="replicas", executor="live script", collections="both"),  # never averaged
    Row(optimizer="ordinary", gradients="GradScaler", dense="fsdp"),  # torch's operator refused both kinds of gradients
    # Two updates, of one backward with two exchanges.
    Row(mode="servers", executor="live script", table="column-wise", collections="one twice"),
)
"""Rows that were wrong, with the reason."""


@pytest.mark.parametrize("row", [pytest.param(row, marks=marks(row), id=str(row)) for row in ONCE_WRONG])
def test_a_row_that_was_wrong(row: Row, tmp_path: Path, store: Any) -> None:
    assert not outcome(row, tmp_path / "row", store.port)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
def test_rows_of_strength_three(tmp_path: Path, store: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(2**31))
    rows = covering(3, seed, FORBIDDEN)
    with capsys.disabled():
        print(f"\n{len(rows)} rows of strength three: {SEED}={seed}", flush=True)
    failed = []
    for number, row in enumerate(rows):
        try:
            faults = outcome(row, tmp_path / f"row{number}", store.port)
        except RankErrors as error:
            faults = [str(error)]
        if faults:
            failed.append(f"{row}: {faults[0]}")
            with capsys.disabled():
                print(failed[-1][:2000], flush=True)
    assert not failed, f"{len(failed)} of {len(rows)} rows of {SEED}={seed}:\n" + "\n".join(failed)


@pytest.mark.some(8)
@pytest.mark.parametrize(
    "refused", [pytest.param(each, marks=marks(each.row()), id=" with ".join(each.names)) for each in REFUSED]
)
def test_a_refusal(refused: Refused, tmp_path: Path, store: Any) -> None:
    """The error names it, the call has changed nothing, and what comes after is as without it."""
    first, *others = outcome(refused.row(), tmp_path / "row", store.port)
    assert first.startswith(f"refused at {refused.stage} by {refused.kind}: "), first
    assert refused.match in first
    assert "; changed: " not in first
    assert not others


def test_refused_combinations_are_few_and_none_is_inside_another() -> None:
    assert len(REFUSED) <= 30
    for one, other in combinations(REFUSED, 2):
        rows = [dict(zip(one.values, choice, strict=True)) for choice in product(*one.values.values())]
        assert not all(has(row, other.values) for row in rows), (one.names, other.names)


def test_the_page_has_this_table() -> None:
    assert table() in PAGE.read_text(), "put what tests.pairs.refused.table() gives into docs/ledger.md"


@given(seed=st.integers(0, 2**16), forbidden=st.lists(st.sampled_from(FORBIDDEN), max_size=6))
@settings(max_examples=3)
def test_a_covering_array_has_each_pair_that_may_be(seed: int, forbidden: list[Any]) -> None:
    rows = [vars(row) for row in covering(2, seed, forbidden, tries=2)]
    assert rows == [vars(row) for row in covering(2, seed, forbidden, tries=2)]
    assert not any(has(row, each) for row in rows for each in forbidden)
    pairs = {pair for row in rows for pair in combinations(row.items(), 2)}
    for one, other in combinations(AXES, 2):
        for values in product(AXES[one], AXES[other]):
            pair = dict(zip((one, other), values, strict=True))
            # No list of these forbids a pair through third values, but where it forbids all of an axis's.
            if not any(set(each) <= set(pair) and has(pair, each) for each in forbidden):
                assert tuple(pair.items()) in pairs, pair
