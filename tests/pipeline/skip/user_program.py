"""A user's program with skips, for mypy."""

from collections.abc import Generator

import torch
from torch import Tensor, nn

from shardrec.pipeline import Pipeline, balance_by_size
from shardrec.pipeline.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables


@skippable(stash=["x"])
class Encode(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, input: Tensor) -> Generator[stash, None, Tensor]:
        yield stash("x", input)
        output: Tensor = self.layer(input)
        return output


class DecodeModule(nn.Module):
    def forward(self, input: Tensor) -> Generator[pop, Tensor, Tensor]:
        x = yield pop("x")
        return input + x


Decode = skippable(pop=["x"])(DecodeModule)
ns = Namespace()
first, last = Encode(3), Decode().isolate(ns)
assert isinstance(first, Skippable)
first.isolate(ns, only=["x"])
model = nn.Sequential(first, last)
verify_skippables(model)
loss: Tensor = Pipeline(model, balance_by_size(2, model), chunks=2).step(
    torch.ones(4, 3), loss_fn=lambda a, b: nn.functional.mse_loss(a, a)
)
