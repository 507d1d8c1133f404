"""``shardrec.DistributedModelParallel``: :func:`shardrec.shard` under TorchRec's name and signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder, ShardingEnv
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from shardrec.errors import ConfigError
from shardrec.layout import ShardingPlan
from shardrec.modules.shard import shard
from shardrec.modules.sharded_model import ShardedModel

__all__ = ["DistributedModelParallel"]


def DistributedModelParallel(  # the name of the class that it takes the place of
    module: nn.Module,
    env: ShardingEnv | None = None,
    device: torch.device | None = None,
    plan: TorchRecPlan | ShardingPlan | None = None,
    sharders: Sequence[ModuleSharder[Any]] | None = None,
    init_data_parallel: bool = True,
    init_parameters: bool = True,
    data_parallel_wrapper: Any = None,
) -> ShardedModel:
    """Shard a model in a program written for ``torchrec.distributed.DistributedModelParallel``.

    Args:
        module: holds ``EmbeddingBagCollection`` or ``EmbeddingCollection`` modules; is changed in place.
        env: whose process group is used; default: the default group.
        device: of the tables and of the model.
        plan: TorchRec's, or shardrec's; default: :func:`shardrec.plan`.
        sharders: ignored, because there is no class per module type; their ``fused_params`` and quantized
            communications are separate options.
        init_data_parallel: must be True: the dense part is wrapped at once.
        init_parameters: must be True: tables on meta are filled at once.
        data_parallel_wrapper: must be None; ``shardrec.shard`` has ``dense=``.

    Returns:
        The sharded model, with ``fused_optimizer``, ``plan`` and the unsharded model's state_dict keys.

    Raises:
        ConfigError: for an argument that shardrec replaces by another one, which the message names.
    """
    fused = [sharder for sharder in sharders or () if getattr(sharder, "fused_params", None)]
    coded = [sharder for sharder in sharders or () if getattr(sharder, "qcomm_codecs_registry", None)]
    remedies = {
        "sharders have fused_params": (
            fused,
            "give the tables their optimizer with apply_optimizer_in_backward before",
        ),
        "sharders have a qcomm_codecs_registry": (coded, "call shardrec.shard(model, comms=QuantizedComms(...))"),
        "init_data_parallel is False": (not init_data_parallel, "call shardrec.shard(model, dense='none')"),
        "init_parameters is False": (not init_parameters, "leave it out: tables on meta are filled one at a time"),
        "data_parallel_wrapper is given": (data_parallel_wrapper is not None, "call shardrec.shard(model, dense=...)"),
    }
    faults = [f"{what}: {remedy}" for what, (there, remedy) in remedies.items() if there]
    if faults:
        raise ConfigError("DistributedModelParallel: " + "; ".join(faults))
    return shard(module, plan, device=device, group=None if env is None else env.process_group)
