"""Plan, shard and train TorchRec models.

``import shardrec`` costs milliseconds: neither torch nor fbgemm-gpu is imported before the first name that needs it
(PEP 562), so that ``shardrec --help`` answers at once and errors about mismatched versions can be told in a sentence.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import TYPE_CHECKING, Any

from shardrec.errors import (
    AnomalyError,
    BusyError,
    CheckpointError,
    ConfigError,
    DataError,
    InputError,
    PeerError,
    PlanError,
    ShardrecError,
    VersionError,
)

if TYPE_CHECKING:
    from shardrec.checkpoint import Checkpoints, load_checkpoint, save_checkpoint
    from shardrec.exchange.wire import QuantizedComms
    from shardrec.ids import DynamicIds
    from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology
    from shardrec.modules import (
        DistributedModelParallel,
        ReplicatedModel,
        ShardedEmbeddingBagCollection,
        ShardedEmbeddingCollection,
        ShardedModel,
        detect_anomaly,
        shard,
    )
    from shardrec.modules.annotate import annotate_for_dynamo, unannotate
    from shardrec.pending import (
        Await,
        Awaitable,
        LazyAwaitable,
        LazyGetItemMixin,
        LazyNoWait,
        as_await,
        as_lazy,
        awaitable,
        awaitable_nowait,
        awaitable_wait,
        fork,
        gather,
        join,
        wait,
    )
    from shardrec.planner import Constraint, plan
    from shardrec.scripting import ScriptError, script
    from shardrec.serve import ExportError
    from shardrec.serve.export import export

__version__ = "0.1.0"

__all__ = [
    "AnomalyError",
    "Await",
    "Awaitable",
    "BusyError",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "Constraint",
    "DataError",
    "DistributedModelParallel",
    "DynamicIds",
    "ExportError",
    "InputError",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "PeerError",
    "PlanError",
    "QuantizedComms",
    "ReplicatedModel",
    "ScriptError",
    "Shard",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardedModel",
    "ShardingPlan",
    "ShardrecError",
    "TableLayout",
    "Topology",
    "VersionError",
    "annotate_for_dynamo",
    "as_await",
    "as_lazy",
    "awaitable",
    "awaitable_nowait",
    "awaitable_wait",
    "detect_anomaly",
    "export",
    "fork",
    "gather",
    "join",
    "load_checkpoint",
    "plan",
    "save_checkpoint",
    "script",
    "shard",
    "unannotate",
    "wait",
]

_NAMES = {
    "checkpoint": "Checkpoints load_checkpoint save_checkpoint",
    "exchange.wire": "QuantizedComms",
    "ids": "DynamicIds",
    "layout": "Shard ShardingPlan TableLayout Topology",
    "modules": "DistributedModelParallel ReplicatedModel ShardedEmbeddingBagCollection ShardedEmbeddingCollection "
    "ShardedModel detect_anomaly shard",
    "modules.annotate": "annotate_for_dynamo unannotate",
    "pending": "Await Awaitable LazyAwaitable LazyGetItemMixin LazyNoWait as_await as_lazy awaitable awaitable_nowait "
    "awaitable_wait fork gather join wait",
    "planner": "Constraint plan",
    "scripting": "ScriptError script",
    "serve": "ExportError",
    "serve.export": "export",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

# The others import fbgemm-gpu or torchrec: a mismatch is to be told before the linker tells it worse.
_WITHOUT_FBGEMM = {"ids", "layout", "pending", "scripting"}


def __getattr__(name: str) -> Any:
    """Imports the home of a public name, or a subpackage such as ``shardrec.layout``, when it is first asked for."""
    home = _HOMES.get(name)
    if home is not None:
        if home not in _WITHOUT_FBGEMM:
            from shardrec._versions import check_versions

            check_versions()
        value = getattr(import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and util.find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; dir({__name__}) lists those it has")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
