"""Attention by groups of rows, and by blocks of positions, is that of each row by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardrec.trainer.data import ClickSchema
from shardrec.trainer.models import sequence
from shardrec.trainer.models.sequence import HSTU, SASRec, SequenceModel

LENGTHS = (150, 3, 0, 70, 129, 3, 64)
SCHEMA = ClickSchema(dense_names=("one",), sparse_names=("history", "item"), num_embeddings=(30, 30))


def attended(block: torch.nn.Module, row_TD: Tensor, length: int) -> Tensor:
    """What a block adds to one row before its network, position by position."""
    heads, columns = block.heads, row_TD.size(1) // block.heads
    if hasattr(block, "bias"):
        gate, *parts = F.silu(block.project_in(block.norm(row_TD))).chunk(4, 1)
    else:
        parts = block.project_in(block.attention_norm(row_TD)).chunk(3, 1)
    query, key, value = (part.view(-1, heads, columns) for part in parts)
    rows = []
    for place in range(length):
        scores = (query[place] * key[: place + 1]).sum(2)
        if hasattr(block, "bias"):
            ages = place - torch.arange(place + 1)
            weights = F.silu(scores + block.bias[:, ages].t()) / block.max_length
        else:
            weights = (scores / columns**0.5).softmax(0)
        rows.append((weights.unsqueeze(2) * value[: place + 1]).sum(0).flatten())
    mixed = torch.stack(rows)
    if hasattr(block, "bias"):
        return block.project_out(block.attended_norm(mixed) * gate)
    return block.project_out(mixed)


@pytest.mark.parametrize("kind", [HSTU, SASRec])
def test_attention_of_groups_is_that_of_each_row(kind: type[SequenceModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "_BLOCK", 64)
    torch.manual_seed(0)
    model = kind(SCHEMA, dim=8, heads=2, max_length=150, blocks=2, dropout=0.0)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") and parameter.dim() == 2:
            torch.nn.init.normal_(parameter)
    tokens = torch.randn(sum(LENGTHS), 8, requires_grad=True)
    found = model.encode(tokens, torch.tensor(LENGTHS))
    rows = []
    for row, length in zip(tokens.split(LENGTHS), LENGTHS, strict=True):
        x = row * 8**0.5 + model.positions(length - 1 - torch.arange(length))
        for block in model.blocks if length else ():
            x = x + attended(block, x, length)
            if hasattr(block, "network"):
                x = x + block.network(block.token_norm(x))
        rows.append(model.norm(x))
    expected = torch.cat(rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(expected)
    inputs = [tokens, *(parameter for name, parameter in model.blocks.named_parameters())]
    gradients = (torch.autograd.grad((weights * encoded).sum(), inputs) for encoded in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
