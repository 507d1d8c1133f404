"""Failing together: any rank's fault is every rank's error, with every rank's words."""

from __future__ import annotations

import pytest
import torch

from shardrec.errors import InputError
from shardrec.exchange.headers import FIXED_COLUMNS, Headers, checksum
from tests.thread_ranks import ThreadCollectives, thread_ranks

CPU = torch.device("cpu")


def raised(collectives: ThreadCollectives, message: str, agreement: str = "") -> str:
    with pytest.raises(InputError) as caught:
        Headers(collectives, CPU).raise_faults(message, agreement)
    assert collectives.unwaited == []
    return str(caught.value)


def test_one_message_is_raised_as_it_is() -> None:
    texts = ["", "feature 'é': naïve id ✗", ""]
    found = thread_ranks(3, lambda collectives: raised(collectives, texts[collectives.rank]))
    assert found == ["rank 1: feature 'é': naïve id ✗"] * 3


def test_several_messages_are_listed_by_rank() -> None:
    texts = ["too many", "", "too few"]
    found = thread_ranks(3, lambda collectives: raised(collectives, texts[collectives.rank]))
    assert found == ["2 ranks have bad input:\n  rank 0: too many\n  rank 2: too few"] * 3


def test_without_a_message_the_agreements_are_shown() -> None:
    found = thread_ranks(2, lambda collectives: raised(collectives, "", f"ids int{32 * (collectives.rank + 1)}"))
    assert (
        found
        == [
            "the ranks disagree about their input. Give every rank the same dtypes and modes:\n"
            "  rank 0: ids int32\n  rank 1: ids int64"
        ]
        * 2
    )


def test_of_the_agreements_what_differs_is_shown() -> None:
    texts = ["ids int32, gradients on; ids int32", "ids int32, gradients off", "ids int32"]
    found = thread_ranks(3, lambda collectives: raised(collectives, "", texts[collectives.rank]))
    assert {message.partition("\n")[2] for message in found} == {
        "  rank 0: gradients on\n  rank 1: gradients off\n  rank 2: none of these"
    }
    calls = ["ids int32", "ids int32; ids int32"]
    found = thread_ranks(2, lambda collectives: raised(collectives, "", calls[collectives.rank]))
    assert {message.partition("\n")[2] for message in found} == {"  rank 0: ids int32\n  rank 1: ids int32; ids int32"}


def test_one_rank_alone() -> None:
    assert thread_ranks(1, lambda collectives: raised(collectives, "no good")) == ["rank 0: no good"]


def test_a_rank_that_cannot_start_still_answers_the_others_header() -> None:
    def rank_main(collectives: ThreadCollectives) -> str:
        headers = Headers(collectives, CPU)
        headers.columns = FIXED_COLUMNS + 2
        with pytest.raises(InputError) as caught:
            if collectives.rank == 1:
                headers.fail_all("broken before the lookup")
            header = torch.zeros((3, headers.columns), dtype=torch.int64)
            received = headers.exchange(header)
            assert received[:, 0].tolist() == [0, 1, 0]
            headers.raise_faults("", "")
        assert headers.exchanged == 1
        return str(caught.value)

    assert thread_ranks(3, rank_main) == ["rank 1: broken before the lookup"] * 3


def test_checksum_tells_texts_apart() -> None:
    assert checksum("ids int32") == checksum("ids int32")
    assert checksum("ids int32") != checksum("ids int64")
    assert 0 <= checksum("") < 2**32
