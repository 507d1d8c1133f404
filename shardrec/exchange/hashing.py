"""The row block of a dynamic id, computed with torch's operators. TorchScript also compiles them.

``shardrec/native/hashing.h`` implements the same in C++. Tests compare the two.
"""

from __future__ import annotations

from torch import Tensor


def mixed(ids: Tensor) -> Tensor:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), a bijection of 64-bit numbers.

    Args:
        ids: int64.

    Returns:
        int64 of the same shape.
    """
    # Right shifts of a negative int64 extend its sign. Torch's products wrap.
    first = (ids ^ ((ids >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    second = (first ^ ((first >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return second ^ ((second >> 31) & 0x1FFFFFFFF)


def home_rows(ids: Tensor, rows: Tensor) -> Tensor:
    """The home row per id, which determines its row block.

    Args:
        ids: (N,) int64.
        rows: (N,) or (), int64, rows of the table, at most 2^31.

    Returns:
        (N,) int64 in ``[0, rows)``, uniform over ids.
    """
    return (((mixed(ids) >> 32) & 0xFFFFFFFF) * rows) >> 32
