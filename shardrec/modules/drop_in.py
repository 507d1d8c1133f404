"""``shardrec.DistributedModelParallel``: :func:`shardrec.shard` under TorchRec's name and signature."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torchrec.distributed.types import CommOp, ModuleSharder, NoOpQuantizedCommCodec, ShardingEnv
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError
from shardrec.exchange.wire_format import WIRE_TYPES, QuantizedComms, WireType
from shardrec.layout import ShardingPlan
from shardrec.layout.discover import collections_of
from shardrec.modules.shard import shard
from shardrec.modules.sharded_model import ShardedModel


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
        module: holds ``EmbeddingBagCollection`` or ``EmbeddingCollection`` modules. Is changed in place.
        env: its process group is used. Default: the default group.
        device: of the tables and of the model.
        plan: TorchRec's, or shardrec's. Default: :func:`shardrec.plan`.
        sharders: their ``qcomm_codecs_registry`` chooses the formats of rows and gradients. shardrec has one format
            forward and one backward for all collections, so the codecs must agree. Nothing else is read.
        init_data_parallel: must be True: the dense part is wrapped immediately.
        init_parameters: must be True: tables on meta are filled immediately.
        data_parallel_wrapper: must be None. ``shardrec.shard`` has ``dense=``.

    Returns:
        The sharded model, with ``fused_optimizer``, ``plan`` and the unsharded model's state_dict keys.

    Raises:
        ConfigError: for an argument that shardrec replaces by another one, which the message names.
    """
    fused = [sharder for sharder in sharders or () if getattr(sharder, "fused_params", None)]
    formats = _wire_formats(module, sharders or ())
    distinct = set(formats.values())
    words = ", ".join(f"{where}: {' and '.join(pair)}" for where, pair in formats.items())
    unknown = sorted({name for pair in distinct for name in pair} - set(WIRE_TYPES))
    remedies = {
        "sharders have fused_params": (
            fused,
            "give the tables their optimizer with apply_optimizer_in_backward before",
        ),
        f"sharders have codecs of the formats {', '.join(unknown)} ({words})": (
            unknown,
            f"choose from {', '.join(WIRE_TYPES)}, without a loss scale",
        ),
        f"sharders have different codecs ({words})": (not unknown and len(distinct) > 1, "give all of them the same"),
        "init_data_parallel is False": (not init_data_parallel, "call shardrec.shard(model, dense='none')"),
        "init_parameters is False": (not init_parameters, "leave it out: tables on meta are filled one at a time"),
        "data_parallel_wrapper is given": (data_parallel_wrapper is not None, "call shardrec.shard(model, dense=...)"),
    }
    faults = [f"{what}: {remedy}" for what, (there, remedy) in remedies.items() if there]
    if faults:
        raise ConfigError("DistributedModelParallel: " + "; ".join(faults))
    output, gradient = next(iter(distinct), ("fp32", "fp32"))
    comms = QuantizedComms(output=cast(WireType, output), gradient=cast(WireType, gradient))
    return shard(module, plan, device=device, group=None if env is None else env.process_group, comms=comms)


def _wire_formats(model: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> dict[str, tuple[str, str]]:
    """The formats, forward and backward, by sharder and collective, of the model's collections.

    A collection belongs to the sharder of the outermost module around it, as in TorchRec.
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    formats: dict[str, tuple[str, str]] = {}
    assigned = set[int]()
    for module in model.modules():
        sharder = by_type.get(type(module))
        if sharder is None:
            continue
        for collection in collections_of(module).values():
            if id(collection) in assigned:
                continue
            assigned.add(id(collection))
            pooled = isinstance(collection, EmbeddingBagCollection)
            for op in CommOp:
                if pooled == (op is not CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL):
                    codecs = (sharder.qcomm_codecs_registry or {}).get(op.name)
                    pair = ("fp32", "fp32") if codecs is None else (_format(codecs.forward), _format(codecs.backward))
                    formats[f"{type(sharder).__name__}, {op.name}"] = pair
    return formats


def _format(codec: object) -> str:
    """The format of one of fbgemm's codecs as shardrec names it. The class of any other codec."""
    if isinstance(codec, NoOpQuantizedCommCodec):
        return "fp32"
    precision = getattr(codec, "_comm_precision", None)  # its dtype does not tell INT8 from FP8
    if precision is None:
        return type(codec).__name__
    scale = getattr(codec, "_loss_scale", None)
    return str(precision.value) if scale is None else f"{precision.value} with loss scale {scale}"
