"""Plans are the same with C++ and without it."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import numpy as np
import pytest

from shardrec.planner import native
from shardrec.planner.native import library
from shardrec.planner.solve import SolveLimits, differences, fillings, knapsack, plane, rebuild, sets, solve, solver
from tests.planner.problems import random_problem


@pytest.mark.skipif(library() is None, reason="the planner's C++ was not built")
@pytest.mark.parametrize("seed", range(2))
def test_a_plan_is_the_same_without_compiled_functions(seed: int) -> None:
    problem = random_problem(Random(seed), most_tables=8, ranks=4)
    limits = SolveLimits(gap=0.0, effort=4)
    # Small problems would go to the exact programme as a whole.
    with patch.object(solver, "solve_exactly", return_value=None):
        wanted = solve(problem, limits)
        with (
            patch.object(differences, "library", return_value=None),
            patch.object(knapsack, "library", return_value=None),
            patch.object(plane, "library", return_value=None),
            patch.object(fillings, "library", return_value=None),
            patch.object(sets, "library", return_value=None),
            patch.object(rebuild, "library", return_value=None),
        ):
            assert solve(problem, limits) == wanted
    assert wanted is not None


@pytest.mark.skipif(library() is None, reason="the planner's C++ was not built")
def test_a_library_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_VERSION", -1)
    with pytest.warns(RuntimeWarning, match=r"older version.*install shardrec again"):
        assert library.__wrapped__() is None
    monkeypatch.setenv("SHARDREC_NATIVE", "0")
    assert library.__wrapped__() is None


def test_only_contiguous_arrays_have_an_address() -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        native.address(np.zeros((2, 2))[:, 0])
