"""Dynamic ids: raw 64-bit ids mapped to rows where the rows are; see docs/dynamic_ids.md."""

from __future__ import annotations

from shardrec.ids.options import DynamicIds

__all__ = ["DynamicIds"]
