"""The columns of the clicks."""

from __future__ import annotations

__all__ = ["SIZES", "SPEC"]

SIZES = {
    "site": 100,
    "city": 60,
    "category": 40,
    "hour": 24,
    "browser": 16,
    "format": 12,
    "advertiser": 10,
    "device": 8,
}
"""Rows of each feature's table."""

SPEC = "label: click\nevent_time: at\nfeatures:\n" + "".join(
    f"  - {{name: {name}, kind: id, rows: {size}, ids: number}}\n" for name, size in SIZES.items()
)
"""The features, for ``shardrec train --features``."""
