"""The large tensors that a step makes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["LargeTensors"]


class LargeTensors(TorchDispatchMode):
    """Counts the floating-point tensors of some bytes or more that operators make."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.made = size, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {one.data_ptr() for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.is_floating_point() and one.data_ptr() not in given:
                self.made[str(func)] += one.nbytes >= self.size
        return found
