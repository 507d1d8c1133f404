"""What test_ranks.py has the ranks do, who import it: TorchScript reads source and globals, which do not travel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import shardrec
from tests.scripting.exchange import ColumnEmbedding
from tests.scripting.lookups import reload

ISSUE = "_c10d_functional_autograd::all_to_all_single"
WAIT = "prim::awaitable_wait"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.shop = (ColumnEmbedding(name, 11, 3) for name in ("user", "item", "shop"))
        self.bottom = nn.Linear(2, 6)
        self.top = nn.Linear(6, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        user = self.user(ids)
        item = self.item(ids + 1)
        shop = self.shop(ids + 2)
        hidden = torch.relu(self.bottom(dense))
        return self.top(hidden * user["user"] + item.values() * shop["shop"]).squeeze(1)


def train(model: Any, rank: int) -> list[Tensor]:
    """The losses of five steps."""
    torch.manual_seed(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        ids = torch.randint(0, 9, (4,))
        loss = (model(torch.randn(4, 2), ids) - ids).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def eager_and_scripted() -> None:
    rank = torch.distributed.get_rank()
    torch.manual_seed(7 + rank)
    eager = Model()
    torch.manual_seed(7 + rank)
    twin = Model()
    scripted: Any = shardrec.script(twin)
    expected, got = train(eager, rank), train(scripted, rank)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    for (name, mine), its in zip(eager.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(its, mine, rtol=0, atol=0, msg=f"{name} after training")
    assert {name: value.data_ptr() for name, value in scripted.named_parameters()} == {
        name: value.data_ptr() for name, value in twin.named_parameters()
    }
    dense, ids = torch.randn(4, 2), torch.arange(4)
    loaded = reload(scripted)
    torch.testing.assert_close(loaded(dense, ids), eager(dense, ids), rtol=0, atol=0)
    torch.testing.assert_close(train(loaded, rank), train(eager, rank), rtol=0, atol=0)


def kinds(graph: Any) -> list[str]:
    """The issues and waits of a graph, in order, inner blocks in their places."""
    found = []
    for node in graph.nodes():
        if node.kind() in (ISSUE, WAIT):
            found.append(node.kind())
        for block in node.blocks():
            found += kinds(block)
    return found


def order_in_graphs() -> tuple[list[str], list[str]]:
    scripted = shardrec.script(Model())
    return kinds(scripted.forward.inlined_graph), kinds(reload(scripted).forward.inlined_graph)
