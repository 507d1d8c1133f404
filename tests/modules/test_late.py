"""Values of compiled code stand in for torchrec's, whose methods read fields of torchrec's choice."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from shardrec.modules.compiled_outputs import Deferred, DeferredJaggedTensor, DeferredKeyedTensor

ROWS = torch.arange(12.0).view(3, 4)
LENGTHS = torch.tensor([2, 1], dtype=torch.int32)


def columns_late() -> DeferredKeyedTensor:
    return DeferredKeyedTensor(Deferred(KeyedTensor, ["a", "b"], [1, 3], ROWS), ["a", "b"], [1, 3])


def rows_late() -> DeferredJaggedTensor:
    return DeferredJaggedTensor(Deferred(dict, {"a": JaggedTensor(ROWS, torch.arange(3), LENGTHS)}), "a", LENGTHS)


def test_they_have_the_fields_of_this_release() -> None:
    """And no others but their own: they are set one by one."""
    deferred_columns, columns = columns_late(), KeyedTensor(["a", "b"], [1, 3], ROWS)
    assert vars(deferred_columns).keys() - {"_pending"} == vars(columns).keys() - {"_values"}
    late_rows, rows = rows_late(), JaggedTensor(ROWS, torch.arange(3), LENGTHS)
    assert vars(late_rows).keys() - {"_pending", "_name"} == vars(rows).keys() - {"_values", "_weights"}


def test_they_answer_as_torchrecs() -> None:
    columns = columns_late()
    assert torch.equal(columns["b"], ROWS[:, 1:])
    assert columns.to_dict().keys() == {"a", "b"}
    assert columns.keys() == ["a", "b"] and columns.offset_per_key() == [0, 1, 4] and columns.key_dim() == 1
    rows = rows_late()
    assert torch.equal(rows.values(), ROWS) and torch.equal(rows.weights(), torch.arange(3))
    assert torch.equal(rows.offsets(), torch.tensor([0, 2, 3]))
    assert [len(one) for one in rows.to_dense()] == [2, 1]
