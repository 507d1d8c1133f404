"""Plan, shard and train TorchRec models.

``import shardrec`` costs milliseconds: neither torch nor fbgemm-gpu is imported before the first name that needs it
(PEP 562), so that ``shardrec --help`` answers at once and errors about mismatched versions can be told in a sentence.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import TYPE_CHECKING, Any

from shardrec.errors import ConfigError, DataError, InputError, PeerError, PlanError, ShardrecError, VersionError

if TYPE_CHECKING:
    from shardrec.awaitable import Awaitable, LazyAwaitable, LazyGetItemMixin, LazyNoWait, wait
    from shardrec.checkpoint import load_checkpoint, save_checkpoint
    from shardrec.exchange.wire import QuantizedComms
    from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology
    from shardrec.modules import (
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        ShardedModel,
        shard,
    )
    from shardrec.planner import Constraint, plan

__version__ = "0.1.0"

__all__ = [
    "Awaitable",
    "ConfigError",
    "Constraint",
    "DataError",
    "InputError",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "PeerError",
    "PlanError",
    "QuantizedComms",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModel",
    "ShardingPlan",
    "ShardrecError",
    "TableLayout",
    "Topology",
    "VersionError",
    "load_checkpoint",
    "plan",
    "save_checkpoint",
    "shard",
    "wait",
]

_HOMES = {
    "Awaitable": "shardrec.awaitable",
    "Constraint": "shardrec.planner",
    "LazyAwaitable": "shardrec.awaitable",
    "LazyGetItemMixin": "shardrec.awaitable",
    "LazyNoWait": "shardrec.awaitable",
    "QuantizedComms": "shardrec.exchange.wire",
    "Shard": "shardrec.layout",
    "ShardedEmbeddingBagCollection": "shardrec.modules",
    "ShardedEmbeddingCollection": "shardrec.modules",
    "ShardedModel": "shardrec.modules",
    "ShardingPlan": "shardrec.layout",
    "TableLayout": "shardrec.layout",
    "Topology": "shardrec.layout",
    "load_checkpoint": "shardrec.checkpoint",
    "plan": "shardrec.planner",
    "save_checkpoint": "shardrec.checkpoint",
    "shard": "shardrec.modules",
    "wait": "shardrec.awaitable",
}

# These import fbgemm-gpu or torchrec: a mismatch is to be told before the linker tells it worse.
_COMPUTING = frozenset({"shardrec.checkpoint", "shardrec.exchange.wire", "shardrec.modules", "shardrec.planner"})


def __getattr__(name: str) -> Any:
    """Imports the home of a public name, or a subpackage such as ``shardrec.layout``, when it is first asked for."""
    home = _HOMES.get(name)
    if home is not None:
        if home in _COMPUTING:
            from shardrec._versions import check_versions

            check_versions()
        value = getattr(import_module(home), name)
    elif not name.startswith("_") and util.find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; dir({__name__}) lists those it has")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
