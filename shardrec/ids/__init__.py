"""Dynamic ids: raw 64-bit ids, mapped to rows on the rank that holds the rows. See docs/dynamic_ids.md."""

from __future__ import annotations

from shardrec.ids.options import DynamicIds

__all__ = ["DynamicIds"]
