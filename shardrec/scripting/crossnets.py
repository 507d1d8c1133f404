"""TorchRec's cross networks with a forward that TorchScript compiles.

TorchRec's own take ``self.kernels[layer]`` with a number that is known only when the loop runs. TorchScript unrolls
loops over the lists themselves. Nothing else differs: the same parameters, names and operators.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet


class _CrossNet(CrossNet):  # type: ignore[misc]  # TorchRec is seen without types
    def forward(self, input: Tensor) -> Tensor:
        """(B, N) to (B, N)."""
        first = input.unsqueeze(2)
        crossed = first
        for kernel, bias in zip(self.kernels, self.bias):  # noqa: B905 - TorchScript has no strict
            crossed = first * (torch.matmul(kernel, crossed) + bias) + crossed
        return torch.squeeze(crossed, dim=2)


class _LowRankCrossNet(LowRankCrossNet):  # type: ignore[misc]  # TorchRec is seen without types
    def forward(self, input: Tensor) -> Tensor:
        """(B, N) to (B, N)."""
        crossed = input
        for down, up, bias in zip(self.V_kernels, self.W_kernels, self.bias):  # noqa: B905 - TorchScript has no strict
            low = nn.functional.linear(crossed, down)
            crossed = input * (nn.functional.linear(low, up) + bias) + crossed
        return crossed


class _VectorCrossNet(VectorCrossNet):  # type: ignore[misc]  # TorchRec is seen without types
    def forward(self, input: Tensor) -> Tensor:
        """(B, N) to (B, N)."""
        first = input.unsqueeze(2)
        crossed = first
        for kernel, bias in zip(self.kernels, self.bias):  # noqa: B905 - TorchScript has no strict
            weight = torch.tensordot(crossed, kernel, dims=([1], [0]))
            crossed = torch.matmul(first, weight) + bias + crossed
        return torch.squeeze(crossed, dim=2)


SCRIPTABLE: dict[type[nn.Module], type[nn.Module]] = {
    CrossNet: _CrossNet,
    LowRankCrossNet: _LowRankCrossNet,
    VectorCrossNet: _VectorCrossNet,
}
"""The class that is scripted instead of a TorchRec class."""
