"""The driver of ``make peers``, without TorchRec's tests: which examples it draws, and how it names what differs."""

from __future__ import annotations

import re
import sys
from itertools import product
from unittest import mock

import pytest
import torchrec.distributed.train_pipeline.train_pipelines as theirs

from tests.peers import counterparts, known
from tests.peers.examples import Unsatisfied, examples_of, stand_in
from tests.peers.main import of_two_ranks, reason_for


def test_examples_are_the_product_in_an_order_of_the_test_s_own() -> None:
    with mock.patch.dict(sys.modules):
        stand_in()
        from hypothesis import assume, given, settings
        from hypothesis import strategies as st

    class Case:
        @settings(max_examples=1, deadline=None)
        @given(cut=st.sampled_from(["rw", "tw"]), weighted=st.booleans(), dim=st.integers(4, 8))
        def three(self, cut: str, weighted: bool, dim: int) -> None:
            """Of three arguments."""

        @given(st.just(1))
        def positional(self, value: int) -> None:
            """Of one whose strategy has no name."""

        def none(self) -> None:
            """Of none."""

    drawn = [tuple(example.values()) for example in examples_of(Case.three)]
    assert sorted(drawn) == list(product(("rw", "tw"), (False, True), (4, 6, 8)))
    assert drawn == [tuple(example.values()) for example in examples_of(Case.three)]
    assert [*examples_of(Case.positional)] == [{"value": 1}]
    assert [*examples_of(Case.none)] == [{}]
    with pytest.raises(Unsatisfied):
        assume(False)


def test_groups_shrink_with_the_ranks() -> None:
    given = {"local_size": 2, "world_size_2D": 4, "node_group_size": None, "sharders": []}
    assert of_two_ranks(8, given) == {**given, "backend": "gloo", "local_size": 1, "world_size_2D": 1}
    assert of_two_ranks(4, given) == {**given, "backend": "gloo", "local_size": 1, "world_size_2D": 2}
    assert of_two_ranks(2, given) == {**given, "backend": "gloo"}


def test_reasons() -> None:
    for pattern, reason in {**known.LEFT_OUT, **known.DIFFERENCES}.items():
        re.compile(pattern)
        assert reason
    assert reason_for("sharding C::test_tw kernel_type=fused_uvm", known.LEFT_OUT).startswith(
        "kernels of unified memory"
    )
    assert reason_for("sharding C::test_tw kernel_type=fused", known.LEFT_OUT) == ""


def test_every_pipeline_of_the_installed_torchrec_has_a_counterpart_or_is_left_out() -> None:
    made = {
        name
        for name, value in vars(theirs).items()
        if isinstance(value, type) and issubclass(value, theirs.TrainPipeline) and value is not theirs.TrainPipeline
    }
    assert made - {*counterparts.PIPELINES, *counterparts.LEFT_OUT} == {"EvalPipelineSparseDist"}
