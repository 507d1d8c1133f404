"""What goes to the ranks and comes back is the same thing."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed
from torch import Tensor

from tests.parcel import pack


@pytest.mark.parametrize(
    "value",
    [
        torch.ops,
        torch.ops.aten,
        torch.ops.aten.add,
        torch.ops.aten.add.Tensor,
        torch.ops._c10d_functional.all_to_all_single,
        torch.ops._c10d_functional.all_to_all_single.default,
        torch.ops.higher_order,
        torch.classes,
        torch.backends,
        torch.distributed,
    ],
    ids=str,
)
def test_modules_and_operators_go_by_name(value: object) -> None:
    assert pickle.loads(pack(value)) is value


def test_functions_that_use_operators_go_with_them() -> None:
    add = torch.ops.aten.add

    def plus(x: Tensor) -> Tensor:
        result: Tensor = add(x, torch.ops.aten.ones_like(x))
        return result

    copy: Callable[[Tensor], Tensor] = pickle.loads(pack(plus))
    assert copy is not plus
    assert copy(torch.tensor([1.0, 2.0])).tolist() == [2.0, 3.0]
