"""The name of a process group, as a program of operators holds it.

[Note: what a file names]
Between ranks of one host a model that lives beside its program exchanges through shared memory, under a name that its
process has given (:mod:`shardrec.exchange.shared.group`). No other process knows that name. So what is written to a
file is the name of the process group itself, which every process has that makes its groups in the same order.
TorchScript asks a module for its state when it is saved, copied or frozen; a module that holds nothing but the name
answers with the other one.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from shardrec.exchange.collectives import Collectives

__all__ = ["GroupName"]


class GroupName(nn.Module):
    """The name that a program's all-to-alls go by.

    Args:
        collectives: of a model; kept, so that the name is that of something.

    Attributes:
        group_name: what operators are given; a process that has loaded the program may set another.
        saved_name: what a file, a copy and a frozen program name.
    """

    # What is for Python only, by the name under which torch.jit looks for it.
    __jit_ignored_attributes__: ClassVar = ["collectives"]

    def __init__(self, collectives: Collectives) -> None:
        super().__init__()
        self.collectives = collectives
        self.group_name = collectives.operator_group
        self.saved_name = collectives.group_name

    @torch.jit.unused
    def use_saved(self) -> None:
        """Name in this process, too, what a file names."""
        self.group_name = self.saved_name

    @torch.jit.export
    def __getstate__(self) -> tuple[str, bool]:
        return self.saved_name, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[str, bool]) -> None:
        self.group_name = state[0]
        self.saved_name = state[0]
        self.training = state[1]

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupName:
        # Of Python's; the two above are TorchScript's.
        return type(self)(self.collectives)
