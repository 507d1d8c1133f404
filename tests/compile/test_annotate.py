"""The marks, and what torch.compile makes of them: breaks, regions, guards."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import shardrec
from shardrec.errors import ConfigError
from tests.compile.compiled import batch, breaks, fresh, graphs, make
from tests.ranks import ranks

MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params", "_traced")


def marks(model: nn.Module) -> dict[str, dict[str, Any]]:
    return {
        name: found
        for name, module in model.named_modules()
        if (found := {mark: vars(module)[mark] for mark in MARKS if mark in vars(module)})
    }


def test_shard_marks_the_sharded_modules_and_what_is_in_them() -> None:
    model = make("towers", None)
    marked = marks(model)
    assert {name.split(".")[1] for name in marked} == {"one", "two"}
    assert all(found[mark] is True for found in marked.values() for mark in MARKS[:2])
    assert "module.one.embedding_bags.t_a" in marked


def test_annotating_twice_is_annotating_once_and_the_mode_can_change() -> None:
    model = make("towers", None)
    first = marks(model)
    shardrec.annotate_for_dynamo(model)
    assert marks(model) == first
    shardrec.annotate_for_dynamo(model, mode="traced")
    traced = marks(model)
    assert {name: set(found) for name, found in traced.items()} == {
        "module.one": {"_traced"},
        "module.two": {"_traced"},
    }
    shardrec.annotate_for_dynamo(model, mode="traced")
    assert marks(model)["module.one"]["_traced"] is traced["module.one"]["_traced"]
    shardrec.annotate_for_dynamo(model, mode="boundary")
    assert marks(model) == first


def test_unannotate_undoes_it_all_and_nothing_else() -> None:
    model = make("towers", None)
    shardrec.modules.unannotate(model)
    assert marks(model) == {}
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    model.before._is_fsdp_managed_module = True  # type: ignore[assignment]  # as FSDP does
    shardrec.annotate_for_dynamo(model, mode="traced")
    shardrec.modules.unannotate(model)
    after = {name: dict(vars(module)) for name, module in model.named_modules()}
    assert after["module.before"].pop("_is_fsdp_managed_module") is True
    assert before.keys() == after.keys()
    assert all(before[name].keys() == after[name].keys() for name in before)


def test_ignored_modules_stay_as_they_are() -> None:
    model = make("towers", None)
    shardrec.modules.unannotate(model)
    shardrec.annotate_for_dynamo(model, ignored_modules=[model.one], mode="traced")
    assert {name.split(".")[1] for name in marks(model)} == {"two"}


def test_the_twins_are_no_part_of_the_model() -> None:
    plain, traced = make("dlrm", None), make("dlrm", "traced")
    assert list(plain.state_dict()) == list(traced.state_dict())
    assert [name for name, _ in plain.named_modules()] == [name for name, _ in traced.named_modules()]


def test_faults_are_told() -> None:
    model = make("dlrm", None)
    with pytest.raises(ConfigError, match=r"mode is 'eager'. Give one of 'boundary', 'traced'"):
        shardrec.annotate_for_dynamo(model, mode="eager")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="use_orig_params is False"):
        shardrec.annotate_for_dynamo(model, [], False)  # FSDP's order
    with pytest.raises(ConfigError, match="Linear holds no sharded collection, so there is nothing to mark"):
        shardrec.annotate_for_dynamo(torch.nn.Linear(2, 2))


def explained(name: str, mode: str, marked: bool | None = None) -> Any:
    model = make(name, mode)
    for module in model.modules() if marked is not None else ():
        for mark in MARKS[:2]:
            vars(module).pop(mark, None)
    for sharded in model._sharded if marked else ():
        for module in sharded.modules():
            vars(module).update(dict.fromkeys(MARKS[:2], True))
    with fresh():
        return torch._dynamo.explain(model)(*batch(Random(0), 4))


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "calls"), [("dlrm", 1), ("dcn", 1), ("sequences", 1), ("towers", 2)])
def test_boundary_mode_breaks_once_per_call(name: str, calls: int) -> None:
    found = explained(name, "boundary")
    assert (found.graph_count, found.graph_break_count) == (calls + 1, calls)


@pytest.mark.some(1)
@pytest.mark.parametrize("name", ["dlrm", pytest.param("dcn", marks=pytest.mark.slow), "sequences", "towers"])
def test_traced_mode_does_not_break(name: str) -> None:
    found = explained(name, "traced")
    assert (found.graph_count, found.graph_break_count, len(found.break_reasons)) == (1, 0, 0)


def test_the_marks_add_no_guard(record_property: Any) -> None:
    for mode in ("boundary", "traced"):
        with_marks, without = (len(explained("least", mode, marked=marked).out_guards) for marked in (True, False))
        record_property(f"guards_{mode}_marked", with_marks)
        record_property(f"guards_{mode}_unmarked", without)
        assert with_marks <= without


def count_on_ranks(mode: str, expected: int) -> None:
    """In DistributedDataParallel, and through torch.compile(model), as a user does."""
    with fresh():
        model = make("towers", mode)
        compiled = torch.compile(model, backend="eager")
        for size in (3, 4):
            compiled(*batch(Random(size), size)).sum().backward()
        assert breaks() == 0 or mode == "boundary"
        assert graphs() <= 2 * expected


@pytest.mark.slow  # test_parity.py counts regions and breaks on two ranks as well
@pytest.mark.parametrize(("mode", "expected"), [("boundary", 3), ("traced", 1)])
def test_on_two_ranks_the_reducer_adds_no_break(mode: str, expected: int) -> None:
    ranks(2, count_on_ranks, mode, expected)


def test_a_compiled_model_notices_eval_mode() -> None:
    with fresh():
        model = make("dlrm", "boundary")
        model.model.over_arch = nn.Sequential(model.model.over_arch, nn.Dropout(1.0))  # type: ignore[union-attr, operator]
        compiled = torch.compile(model, backend="eager")
        dense, features = batch(Random(0), 4)
        assert not compiled(dense, features).any()
        assert compiled.eval()(dense, features).any()
