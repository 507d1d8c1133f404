"""Plan, shard and train TorchRec models.

``import shardrec`` costs milliseconds: neither torch nor fbgemm-gpu is imported before the first name that needs it
(PEP 562), so that ``shardrec --help`` answers quickly and errors about mismatched versions can be told in a sentence.
"""

from __future__ import annotations

import logging
from importlib import import_module, util
from typing import TYPE_CHECKING, Any

from shardrec._late_imports import PROVIDED
from shardrec.errors import (
    AnomalyError,
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
    from shardrec.checkpoint import Checkpoints, load_checkpoint, save_checkpoint, warm_start
    from shardrec.exchange.wire_format import QuantizedComms
    from shardrec.ids import DynamicIds
    from shardrec.layout import ShardingPlan, Topology
    from shardrec.modules import (
        DistributedModelParallel,
        Servers,
        ShardedModel,
        annotate_for_dynamo,
        clip_grad_norm_,
        clip_grad_value_,
        detect_anomaly,
    )
    from shardrec.modules.shard import shard
    from shardrec.pending import LazyAwaitable, wait
    from shardrec.planner import Constraint, plan
    from shardrec.replicas import ElasticModel, Replicas
    from shardrec.scripting import script
    from shardrec.serve.exporter import export
    from shardrec.serve.publisher import Publisher

__version__ = "0.1.0"

__all__ = [
    "AnomalyError",
    "CheckpointError",
    "Checkpoints",
    "ConfigError",
    "Constraint",
    "DataError",
    "DistributedModelParallel",
    "DynamicIds",
    "ElasticModel",
    "InputError",
    "LazyAwaitable",
    "PeerError",
    "PlanError",
    "Publisher",
    "QuantizedComms",
    "Replicas",
    "Servers",
    "ShardedModel",
    "ShardingPlan",
    "ShardrecError",
    "Topology",
    "VersionError",
    "annotate_for_dynamo",
    "clip_grad_norm_",
    "clip_grad_value_",
    "detect_anomaly",
    "export",
    "load_checkpoint",
    "plan",
    "save_checkpoint",
    "script",
    "shard",
    "wait",
    "warm_start",
]

_NAMES = {
    "checkpoint": "Checkpoints load_checkpoint save_checkpoint warm_start",
    "exchange.wire_format": "QuantizedComms",
    "ids": "DynamicIds",
    "layout": "ShardingPlan Topology",
    "modules": "DistributedModelParallel Servers ShardedModel annotate_for_dynamo "
    "clip_grad_norm_ clip_grad_value_ detect_anomaly shard",
    "pending": "LazyAwaitable wait",
    "planner": "Constraint plan",
    "replicas": "ElasticModel Replicas",
    "scripting": "script",
    "serve.exporter": "export",
    "serve.publisher": "Publisher",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

# The others import fbgemm-gpu or torchrec: a mismatch is to be told before the linker tells it worse.
_WITHOUT_FBGEMM = {"errors", "ids", "layout", "pending", "scripting"}


PROVIDED |= {
    "ElasticModel": "shardrec.replicas",
    "ReplicatedModel": "shardrec.replicas",
    "portable_twin": "shardrec.portable",
    "replan_model": "shardrec.checkpoint.replan",
    "reshard_model": "shardrec.checkpoint.reshard",
    "shard_over_servers": "shardrec.rpc.remote_model",
}

# torch warns in each process of a renamed function, when TorchRec creates the first KeyedJaggedTensor.
logging.getLogger("torch.fx._symbolic_trace").addFilter(lambda record: "is_fx_tracing" not in str(record.msg))


def __getattr__(name: str) -> Any:
    """Imports the home of a public name, or a subpackage such as ``shardrec.layout``, when it is first asked for."""
    home = _HOMES.get(name)
    if home is not None:
        if home not in _WITHOUT_FBGEMM:
            from shardrec._versions import check_versions  # 5 ms, for functions that need the libraries

            check_versions()
        value = getattr(import_module(f"{__name__}.{home}"), name)
    elif not name.startswith("_") and util.find_spec(f"{__name__}.{name}") is not None:
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}. dir({__name__}) lists its attributes")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
