"""Blocks of shared memory: never in two hands, free again when the last tensor is gone."""

from __future__ import annotations

import gc
import os
from random import Random

import numpy as np
import torch
from hypothesis import given, settings

from shardrec.exchange.shared.windows import Arena, PeerWindows, as_tensor
from tests.plans import randoms


@settings(max_examples=8)
@given(rng=randoms())
def test_what_is_held_is_not_lent_again(rng: Random) -> None:
    peer = PeerWindows()
    arena = Arena(lambda number, size, descriptor: peer.add(number, size, os.dup(descriptor)))
    held: list[tuple[int, torch.Tensor, torch.Tensor]] = []
    for step in range(50):
        if held and rng.random() < 0.45:
            held.pop(rng.randrange(len(held)))
        else:
            block = arena.lend(rng.choice([1, 100, 4096, 5000, 1 << 16, 40 << 20]))
            tensor = as_tensor(block.bytes, torch.uint8)[rng.randrange(block.bytes.size) :]  # a view holds it, too
            tensor[:64].fill_(step)
            theirs = as_tensor(peer.bytes(block.window, block.offset, block.bytes.size), torch.uint8)
            held.append((step, tensor, theirs[block.bytes.size - tensor.numel() :]))
            del block, tensor, theirs
        assert all((mine[:64] == number).all() and (theirs[:64] == number).all() for number, mine, theirs in held)
        assert arena.lent_bytes >= sum(mine.numel() for _, mine, _ in held)
    held.clear()
    gc.collect()
    assert arena.lent_bytes == 0
    assert len(arena._free) == len({window for window, _, _ in arena._free}), "free neighbours are one"


def test_a_free_block_is_used_again() -> None:
    arena = Arena(lambda number, size, descriptor: None)
    places = set()
    for _ in range(10):
        block = arena.lend(1 << 20)
        places.add((block.window, block.offset))
        del block
    assert len(places) == 1
    assert arena.total_bytes == 32 << 20


def test_no_bytes_are_an_empty_tensor() -> None:
    assert as_tensor(np.empty(0, dtype=np.uint8), torch.float32).shape == (0,)
