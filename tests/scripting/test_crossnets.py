"""TorchRec's cross networks: they do not script, ours in their place do, and compute the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet

from tests.scripting.lookups import script

NETWORKS = [
    pytest.param(lambda: CrossNet(6, 3), id="full"),
    pytest.param(lambda: LowRankCrossNet(6, 3, low_rank=2), id="low_rank"),
    pytest.param(lambda: VectorCrossNet(6, 3), id="vector"),
]


@pytest.mark.parametrize("make", NETWORKS)
def test_computes_the_same(make: type[nn.Module]) -> None:
    network, x = make(), torch.randn(5, 6)
    for parameter in network.parameters():
        nn.init.normal_(parameter)
    with pytest.raises(RuntimeError), pytest.warns(DeprecationWarning):
        torch.jit.script(network)
    scripted = script(nn.Sequential(network))
    torch.testing.assert_close(scripted(x), network(x), rtol=0, atol=0)
    assert list(scripted.state_dict()) == [f"0.{name}" for name in network.state_dict()]
    scripted(x).square().sum().backward()
    got = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    network(x).square().sum().backward()
    torch.testing.assert_close(got, [parameter.grad for parameter in network.parameters()], rtol=1e-5, atol=1e-5)
    assert type(network).__module__ == "torchrec.modules.crossnet"
