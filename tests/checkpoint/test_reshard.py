"""`model.reshard`: what it moves is, to the last bit, what a save and a load under the new plan give."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.checkpoint.reshards import Case, cases, check
from tests.ranks import ranks


def equal_to_a_load(case: Case) -> None:
    topology = case.plans[0].topology
    with tempfile.TemporaryDirectory() as folder:
        for found in ranks(topology.world_size, check, case, Path(folder), hosts=topology.hosts):
            assert not found, "\n".join(found[:5])


@given(cases())
@settings(max_examples=12)
def test_any_plans(case: Case) -> None:
    equal_to_a_load(case)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@given(cases())
@settings(max_examples=250)  # of two changes of plan each
def test_many_plans(case: Case) -> None:
    equal_to_a_load(case)
