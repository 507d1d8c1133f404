"""The driver of ``make peers``, without TorchRec's tests: which examples it draws, and how it names what differs."""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torchrec.distributed.train_pipeline.train_pipelines as theirs
from torchrec.optim.clipping import GradientClipping
from torchrec.optim.test_utils import DummyKeyedOptimizer

from tests.peers import counterparts, known
from tests.peers.examples import Unsatisfied, examples_of, stand_in
from tests.peers.main import known_difference, of_two_ranks, reason_for


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
    for pattern, reason in known.LEFT_OUT.items():
        re.compile(pattern)
        assert reason
    assert reason_for("sharding C::test_tw kernel_type=fused_uvm", known.LEFT_OUT).startswith(
        "kernels of unified memory"
    )
    assert reason_for("sharding C::test_tw kernel_type=fused", known.LEFT_OUT) == ""


def test_a_known_difference_is_one_by_its_error() -> None:
    for pattern, (reason, error) in known.DIFFERENCES.items():
        re.compile(pattern)
        assert reason
        assert error
    name = "pipelines TrainPipelineSparseDistTest::test_feature_processed_ebc"
    assert known_difference(name, "AssertionError: 0 != 1\n").startswith("ids travel with their weights")
    assert known_difference(name, "AssertionError: Tensor-likes are not close!") == ""
    assert (
        known_difference("pipelines TrainPipelineBaseTest::test_equal_to_non_pipelined", "AssertionError: 0 != 1") == ""
    )


def test_the_clipping_that_the_tests_get_is_ours() -> None:
    first, second = (torch.zeros(2, requires_grad=True) for _ in range(2))
    optimizer = DummyKeyedOptimizer({"first": first, "second": second}, {}, [{"params": [first, second]}])
    clips = counterparts.GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=1.0)
    for _ in range(2):
        first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
        clips.step()
        assert clips.last_total_grad_norm is not None
        torch.testing.assert_close(clips.last_total_grad_norm, torch.tensor(5.0))
        torch.testing.assert_close(torch.cat([first.grad, second.grad]), torch.tensor([0.6, 0.0, 0.0, 0.8]))


def test_the_list_of_pipeline_tests_has_the_reasons() -> None:
    rows = re.findall(r"^\| `(\w+)::(\w+)` \| (.*) \|$", (Path(__file__).parent / "README.md").read_text(), re.M)
    assert len(rows) == 24
    for cls, test, outcome in rows:
        name = f"pipelines {cls}::{test}"
        reasons = [reason for pattern, (reason, _) in known.DIFFERENCES.items() if re.search(pattern, name)]
        assert outcome.startswith("passes") if not reasons else reasons[0] in outcome


def test_every_pipeline_of_the_installed_torchrec_has_a_counterpart_or_is_left_out() -> None:
    made = {
        name
        for name, value in vars(theirs).items()
        if isinstance(value, type) and issubclass(value, theirs.TrainPipeline) and value is not theirs.TrainPipeline
    }
    assert made - {*counterparts.PIPELINES, *counterparts.LEFT_OUT} == {"EvalPipelineSparseDist"}
