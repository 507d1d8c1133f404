"""Imported first by the process that ranks are forked from. See ``preloaded.py``."""

from __future__ import annotations

import gc

# Collections during the imports, of which everything stays, would take a fifth of their time.
gc.disable()
