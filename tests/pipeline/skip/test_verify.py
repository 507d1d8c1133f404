"""What does not fit together is told before anything runs."""

from __future__ import annotations

import pytest
from torch import nn

from shardrec.pipeline.skip import Namespace, skippable, verify_skippables
from tests.pipeline.skip.layers import Both, Scale, popping, stashing


def faults(*layers: nn.Module) -> list[str]:
    """The faults of a sequential."""
    with pytest.raises(TypeError, match="the skips do not fit together") as caught:
        verify_skippables(nn.Sequential(*layers))
    return [line.removeprefix("  - ") for line in str(caught.value).splitlines()[1:]]


def test_pairs_fit() -> None:
    verify_skippables(nn.Sequential(stashing("a"), nn.ReLU(), popping("a")))
    verify_skippables(nn.Sequential(stashing("early"), Both(), popping("late")))
    verify_skippables(nn.Sequential(nn.Linear(1, 1), Scale()))


def test_never_popped() -> None:
    #   stash a ───────►
    assert faults(stashing("a"), nn.ReLU()) == [
        "layer '0' stashes 'a', which no layer pops: pop it in a later layer, or do not stash it"
    ]


def test_never_stashed() -> None:
    #         ───────► pop a
    (fault,) = faults(nn.ReLU(), popping("a"))
    assert fault.startswith("layer '1' pops 'a', which no layer before it stashes: ")


def test_popped_before_it_is_stashed() -> None:
    #   pop a ◄──────── stash a
    (fault,) = faults(popping("a"), stashing("a"))
    assert fault.startswith("layer '0' pops 'a', which no layer before it stashes: ")


def test_stashed_twice() -> None:
    #   stash a ──┬──► pop a
    #   stash a ──┘
    (fault,) = faults(stashing("a"), stashing("a"), popping("a"))
    assert fault.startswith("layer '1' stashes 'a', which layer '0' has stashed: isolate")


def test_popped_twice() -> None:
    #   stash a ──┬──► pop a
    #             └──► pop a
    (fault,) = faults(stashing("a"), popping("a"), popping("a"))
    assert fault.startswith("layer '2' pops 'a', which layer '1' has popped: isolate")


def test_two_pairs_need_namespaces() -> None:
    layers = [stashing("a"), popping("a"), stashing("a"), popping("a")]
    assert len(faults(*layers)) == 2
    ns = Namespace()
    layers[2].isolate(ns)
    assert len(faults(*layers)) == 2  # popped twice; stashed in the namespace and not popped there
    layers[3].isolate(ns)
    verify_skippables(nn.Sequential(*layers))


def test_namespaces_cross() -> None:
    #   stash ns1 ──────── pop ns1
    #        stash ns2 ───────── pop ns2
    ns1, ns2 = Namespace(), Namespace()
    layers = [stashing("a"), stashing("a"), popping("a"), popping("a")]
    for layer, ns in zip(layers, [ns1, ns2, ns1, ns2], strict=True):
        layer.isolate(ns)
    verify_skippables(nn.Sequential(*layers))
    layers[2].isolate(Namespace())
    assert [fault.split(",")[0] for fault in faults(*layers)] == [
        "layer '2' pops 'a'",
        "layer '0' stashes 'a'",
    ]


def test_one_module_declares_both() -> None:
    class Module(nn.Module):
        pass

    (fault,) = faults(skippable(stash=["a"], pop=["a"])(Module)())
    assert fault == "layer '0' declares 'a' both as stash and as pop: give the two skips different names"


def test_all_faults_are_told_at_once() -> None:
    found = faults(stashing("a", "b"), stashing("a"), popping("c"), popping("a"), popping("a"))
    assert [fault.split(",")[0] for fault in found] == [
        "layer '1' stashes 'a'",
        "layer '2' pops 'c'",
        "layer '4' pops 'a'",
        "layer '0' stashes 'b'",
    ]


def test_nested_and_repeated_layers_are_seen() -> None:
    verify_skippables(nn.Sequential(nn.Sequential(stashing("a"), nn.ReLU()), nn.Sequential(popping("a"))))
    again = stashing("a")
    (fault,) = faults(nn.Sequential(again), nn.Sequential(again), popping("a"))
    assert fault.startswith("layer '1.0' stashes 'a', which layer '0.0' has stashed")
