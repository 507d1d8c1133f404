"""The lookup of a rank's shards as modules that TorchScript compiles and saves.

fbgemm's own module scripts, but cannot be saved: it calls Python functions of its own. What it does in the end is one
operator. So its arguments are caught once, from a lookup of nothing, and a module is made that calls the operator with
them: the weights, optimizer states and learning rate among them are the live ones. As nothing is written here about
which arguments there are, it holds for each optimizer and for each version of fbgemm.

Shapes: S slots of this rank, B_all the samples of all ranks, N ids, D pooled columns of this rank.
"""

from __future__ import annotations

import linecache
from collections.abc import Sequence
from enum import Enum
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardrec._torchscript import counts_of
from shardrec.lookup.bank import TableBank

__all__ = ["DenseTables", "NoTables", "kernel_module"]

_NUMBERS = count()
_INPUTS = {"indices": "ids", "offsets": "offsets", "indice_weights": "weights"}
_LISTS: dict[str, Any] = {
    "List[Optional[Tensor]]": list[Tensor | None],
    "List[Tensor]": list[Tensor],
    "List[int]": list[int],
    "List[float]": list[float],
    "List[bool]": list[bool],
}


class _Catch(TorchFunctionMode):
    """Keeps the call of fbgemm's lookup operator."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func).startswith("fbgemm.split_embedding_codegen_lookup"):
            assert not args, "fbgemm names the arguments of its lookups"
            self.calls.append((func, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def kernel_module(bank: TableBank, *, updates: bool = True) -> nn.Module:
    """A module that takes ids (N,), lengths (S, B_all), weights (N,) or None and gives what the bank's look-up gives.

    Args:
        bank: has a kernel of fbgemm's.
        updates: its backward updates the bank's weights if the bank has a fused optimizer, as the bank's own does; not
            for one that counts steps (Adam), whose number the operator takes as a constant. Else it has no backward.
    """
    assert not (updates and bank.optimizer is not None and bank.optimizer.counts_steps), (
        "the step count would be frozen"
    )
    ids = torch.zeros(0, dtype=torch.int64, device=bank.device)
    offsets = torch.zeros(len(bank.slot_tables) + 1, dtype=torch.int64, device=bank.device)
    with _Catch() as caught, torch.no_grad():
        bank.kernel(ids, offsets, None)
    ((operator, arguments),) = caught.calls
    return _operator_module(operator, arguments, updates=updates)


def _operator_module(operator: Any, arguments: dict[str, Any], *, updates: bool) -> nn.Module:
    """A module with the arguments as attributes, whose forward is the operator's call, made from source text."""
    overload = operator.default
    types = {one.name: str(one.type) for one in overload._schema.arguments}
    constants: dict[str, Any] = {}
    passed = []
    for name, value in arguments.items():
        if name in _INPUTS:
            passed.append(f"{name}={_INPUTS[name]}")
        elif value is not None:
            constants[name] = value
            passed.append(f"{name}=self.{name}")
        elif types[name].startswith("Optional"):
            passed.append(f"{name}=None")
    call = [f"    return torch.ops.fbgemm.{overload._schema.name.split('::')[1]}({', '.join(passed)})\n"]
    lines = [
        "def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:\n",
        "    ids = ids.to(torch.int64)\n",
        "    offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.reshape(-1)).to(torch.int64)\n",
        *(call if updates else ["    with torch.no_grad():\n", "    " + call[0]]),
    ]
    source = f"<shardrec lookup {next(_NUMBERS)}>"
    linecache.cache[source] = (sum(map(len, lines)), None, lines, source)
    names: dict[str, Any] = {"torch": torch, "Tensor": Tensor}
    exec(compile("".join(lines), source, "exec"), names)
    cls = type("KernelCall", (nn.Module,), {"forward": names["forward"], "__module__": __name__})
    module: nn.Module = cls()
    for name, value in constants.items():
        plain = value.value if isinstance(value, Enum) else value
        if types[name] in _LISTS:
            # An empty list, or one with None in it, does not show its type.
            plain = torch.jit.Attribute(list(plain), _LISTS[types[name]])
        elif isinstance(plain, nn.Parameter):
            # It is fbgemm's way to get a gradient function, and not one of the model's parameters.
            plain = torch.jit.Attribute(plain, Tensor)
        setattr(module, name, plain)
    return module


class _Table(nn.Module):
    """One table whose parameter takes a dense gradient.

    Args:
        weight: (rows, w) parameter.
        pooled: sums of bags; else rows.
    """

    def __init__(self, weight: nn.Parameter, pooled: bool) -> None:
        super().__init__()
        self.weight = weight
        self.pooled = pooled

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B, w) or (N, w) float32, from ``ids`` (N,), ``lengths`` (B,) and ``weights`` (N,)."""
        rows = nn.functional.embedding(ids, self.weight).to(torch.float32)
        if not self.pooled:
            return rows
        if weights is not None:
            rows = rows * weights.unsqueeze(1)
        # Not embedding_bag, which has no float16 on the CPU and rounds each sum to the weights' dtype.
        bags = torch.arange(lengths.size(0), device=ids.device).repeat_interleave(
            lengths.to(torch.int64), output_size=ids.size(0)
        )
        return rows.new_zeros([lengths.size(0), rows.size(1)]).index_add(0, bags, rows)


class DenseTables(nn.Module):
    """Tables without an optimizer in backward, or replicated ones.

    Args:
        weights: a parameter per table.
        slot_tables: per slot, the number of its table.
        pooled: sums of bags; else rows.
    """

    def __init__(self, weights: Sequence[nn.Parameter], slot_tables: Sequence[int], *, pooled: bool) -> None:
        super().__init__()
        tables = [_Table(weight, pooled) for weight in weights]
        self.slots = nn.ModuleList([tables[number] for number in slot_tables])
        self.pooled = pooled

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, D) or (N, w) float32, from ``ids`` (N,), ``lengths`` (S, B_all) and ``weights`` (N,)."""
        counts = counts_of(lengths.sum(dim=1), ids.size(0))
        ids_of = ids.to(torch.int64).split(counts)
        found: list[Tensor] = []
        for slot, table in enumerate(self.slots):
            part: Tensor | None = None
            if weights is not None:
                part = weights.split(counts)[slot]
            found.append(table(ids_of[slot], lengths[slot], part))
        return torch.cat(found, dim=1 if self.pooled else 0)


class NoTables(nn.Module):
    """A group of which this rank holds nothing.

    Args:
        width: columns of a row without pooling; 0 with.
        device: of the other groups' rows.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.width = width
        self.nothing = torch.zeros(0, device=device)

    def forward(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """(B_all, 0), or (0, w) without pooling."""
        if self.width > 0:
            return self.nothing.new_zeros([0, self.width])
        return self.nothing.new_zeros([lengths.size(1), 0])
