"""When queued calls are sent, as a state machine without a queue."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardrec.step.call_batching import CallBatching

MODULES = 7
LENGTHS = st.lists(st.integers(1, MODULES - 1), max_size=4)


def sent(runs: CallBatching, lengths: list[int], *, by_program: bool = False) -> list[list[bool]]:
    """Of each run, after which of its calls the queue would send; a value is used after each run."""
    result = []
    for number, length in enumerate(lengths):
        result.append([runs.call(number, MODULES, by_program=by_program) for _ in range(length)])
        runs.use()
    return result


def forward(runs: CallBatching, lengths: list[int], mode: str = "") -> list[list[bool]]:
    runs.begin(mode)
    result = sent(runs, lengths)
    runs.end()
    return result


def with_last_calls(lengths: list[int]) -> list[list[bool]]:
    return [[False] * (length - 1) + [True] for length in lengths]


def never(lengths: list[int]) -> list[list[bool]]:
    return [[False] * length for length in lengths]


@given(LENGTHS)
def test_the_second_forward_sends_each_run_with_its_last_call(lengths: list[int]) -> None:
    runs = CallBatching()
    assert forward(runs, lengths) == never(lengths), "fewer calls than modules: the first use sends them"
    for _ in range(2):
        assert forward(runs, lengths) == with_last_calls(lengths)


@given(LENGTHS, LENGTHS)
def test_runs_beyond_those_known_wait_for_every_module(lengths: list[int], more: list[int]) -> None:
    runs = CallBatching()
    forward(runs, lengths)
    assert forward(runs, lengths + more) == with_last_calls(lengths) + never(more)
    assert forward(runs, lengths + more) == with_last_calls(lengths + more)


@given(LENGTHS, LENGTHS)
def test_a_forward_made_again_sends_as_the_one_before_and_is_not_remembered(
    lengths: list[int], other: list[int]
) -> None:
    runs = CallBatching()
    for _ in range(3):
        before = forward(runs, lengths)
        forward(runs, other, mode="evaluation")
        runs.begin("", is_again=True)
        assert sent(runs, lengths) == before
        runs.end()
    assert before == with_last_calls(lengths)


def test_a_first_forward_sends_when_each_module_has_been_called() -> None:
    runs = CallBatching()
    assert forward(runs, [MODULES]) == with_last_calls([MODULES])


@given(LENGTHS)
def test_after_a_forward_that_failed_nothing_is_known(lengths: list[int]) -> None:
    runs = CallBatching()
    forward(runs, lengths)
    runs.begin("")
    runs.call(0, MODULES, by_program=False)
    runs.fail()
    assert runs.known == tuple(lengths), "for the calls that this rank still owes the others"
    assert forward(runs, lengths) == never(lengths)
    runs.forget()
    assert forward(runs, lengths) == never(lengths)


@given(LENGTHS)
def test_outside_of_a_forward_each_call_is_sent_at_once(lengths: list[int]) -> None:
    assert sent(CallBatching(), lengths) == [[True] * length for length in lengths]


@given(LENGTHS)
def test_a_program_repeats_the_runs_that_began_with_the_same_module(lengths: list[int]) -> None:
    runs = CallBatching()
    assert sent(runs, lengths, by_program=True) == never(lengths)
    assert sent(runs, lengths, by_program=True) == with_last_calls(lengths)
    forward(runs, [1, 2])
    assert sent(runs, lengths, by_program=True) == with_last_calls(lengths)


@given(LENGTHS, LENGTHS)
def test_training_and_evaluation_have_runs_of_their_own(lengths: list[int], others: list[int]) -> None:
    runs = CallBatching()
    forward(runs, lengths, "training")
    assert forward(runs, others, "evaluation") == never(others)
    assert forward(runs, lengths, "training") == with_last_calls(lengths)
    runs.begin("evaluation")
    runs.fail()
    assert forward(runs, lengths, "training") == never(lengths), "another rank may have failed in training"
    assert forward(runs, others, "evaluation") == never(others)


def test_ranks_that_failed_in_different_modes_know_the_same() -> None:
    both = CallBatching(), CallBatching()
    for batching in both:
        batching.begin("training")
        for module in range(2):
            batching.call(module, 2, by_program=False)
            batching.use()
        batching.end()
    for batching, mode in zip(both, ("training", "evaluation"), strict=True):
        batching.begin(mode)
        batching.fail()
    for batching in both:
        batching.begin("training")
    assert both[0].known == both[1].known


def test_a_forward_without_calls_leaves_what_is_known() -> None:
    """Ranks may make it in different modes, since no header compares them."""
    both = CallBatching(), CallBatching()
    for batching, mode in zip(both, (True, False), strict=True):
        forward(batching, [2, 1], True)
        forward(batching, [], mode)
        batching.begin(True)
    assert both[0].known == both[1].known == (2, 1)
