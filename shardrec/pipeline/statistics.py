"""Running statistics of batch norms, of the mini-batch and not of its last micro-batches.

A BatchNorm layer sees micro-batches, and normalizes each by its own mean and variance, as GPipe (Huang et al., 2019)
does. Its running statistics must cover the whole mini-batch, updated once, regardless of the number of
micro-batches and recomputations. So while a stage runs, its batch norms do not update them, and a hook accumulates the
batch statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardrec.exchange.recomputation import is_recomputing


class MiniBatchStatistics:
    """The batch norms of a stage during a step."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # SyncBatchNorm exchanges its statistics in forward, and keeps its own way.
        self._norms = [
            module for module in modules if isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
        ]
        self._moments: dict[nn.Module, tuple[int, Tensor, Tensor]] = {}

    @contextmanager
    def collected(self, is_good: Callable[[], bool]) -> Iterator[None]:
        """Collect inside the block. At its end, update the running statistics if the step ``is_good``."""
        norms = [norm for norm in self._norms if norm.training and norm.track_running_stats]
        hooks = [norm.register_forward_pre_hook(self._see) for norm in norms]
        for norm in norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm, hook in zip(norms, hooks, strict=True):
                hook.remove()
                norm.track_running_stats = True
                if norm in self._moments and is_good():
                    _update(norm, *self._moments[norm])
            self._moments.clear()

    @torch.no_grad()
    def _see(self, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Add a micro-batch's count, mean and sum of squared deviations (Chan et al., 1979)."""
        values = args[0]
        if is_recomputing() or values.numel() == 0:
            return
        others = [dim for dim in range(values.dim()) if dim != 1]
        count = values.numel() // values.size(1)
        dtype = torch.promote_types(values.dtype, torch.float32)
        variance, mean = torch.var_mean(values.to(dtype), others, correction=0)
        squares = variance * count
        if norm in self._moments:
            old_count, old_mean, old_squares = self._moments[norm]
            total = old_count + count
            delta = mean - old_mean
            squares = old_squares + squares + delta * delta * (old_count * count / total)
            mean = old_mean + delta * (count / total)
            count = total
        self._moments[norm] = (count, mean, squares)


@torch.no_grad()
def _update(norm: _BatchNorm, count: int, mean: Tensor, squares: Tensor) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if norm.momentum is not None:
        weight = norm.momentum
    else:
        assert norm.num_batches_tracked is not None, "a batch norm that tracks statistics counts its batches"
        weight = 1.0 / float(norm.num_batches_tracked)
    for running, value in ((norm.running_mean, mean), (norm.running_var, squares / max(1, count - 1))):
        assert running is not None, "a batch norm that tracks statistics has them"
        running.lerp_(value.to(running.dtype), weight)
