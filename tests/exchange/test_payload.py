"""Requests from outside of the ranks: words that do not fit their header are told from those that do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardrec.exchange.payload import Payload
from shardrec.exchange.route import Lookup, build_route
from shardrec.layout import cuts

LENGTHS = torch.tensor([[1, 0, 2], [1, 1, 0], [0, 3, 0]], dtype=torch.int32)  # three slots of rank 1
IDS = torch.arange(8, dtype=torch.int32)
SIZES = [3, 2, 2]


def payload() -> Payload:
    """Of rank 1, which has the tables of three lookups; rank 0 has none."""
    layouts = [cuts.table_wise(f"t{number}", 9, 4, rank=1) for number in range(3)]
    lookups = [
        Lookup(feature=layout.name, layout=layout, group=group, output=layout.name, mean=False)
        for layout, group in zip(layouts, (0, 1, 1), strict=True)
    ]
    route = build_route(lookups, 2, 2)
    return Payload(route, 1, weighted=False, device=torch.device("cpu"))


def request(sizes: list[int] | None) -> tuple[Tensor, list[int]]:
    """Words and header: batch size, words of the bags, ids per group."""
    packer = payload()
    words = torch.cat(packer.pack(LENGTHS, IDS, None, [0, 8], sizes)[1])
    return words, [3, packer.bag_words(sizes)[1], 3, 5]


@pytest.mark.parametrize("sizes", [None, SIZES])
def test_what_was_packed_is_there(sizes: list[int] | None) -> None:
    found = payload().lengths_and_ids(*request(sizes))
    assert found is not None
    assert torch.equal(found[0], LENGTHS)
    assert torch.equal(found[1], IDS)


def test_what_does_not_fit_is_refused() -> None:
    words, header = request(SIZES)
    for sizes in ([4, 1, 2], [-1, 4, 4], [3, 2, 1], [3, 3, 2]):
        wrong = words.clone()
        wrong[:3] = torch.tensor(sizes, dtype=torch.int32)
        assert payload().lengths_and_ids(wrong, header) is None, sizes
    assert payload().lengths_and_ids(words[:-1], header) is None
    assert payload().lengths_and_ids(torch.cat([words, words[:1]]), header) is None
    assert payload().lengths_and_ids(words, [3, header[1], 4, 4]) is None, "ids of another group"
    assert payload().lengths_and_ids(words[:2], [3, 2, 0, 0]) is None, "less than a size for each slot"
