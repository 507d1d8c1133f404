"""Checks that no layer of a stage uses the gradients of one micro-batch as if they were the mini-batch's."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardrec.errors import ConfigError


def check_layers(module: nn.Sequential) -> None:
    """Check that nothing in a sequential reduces gradients, or updates weights, at each micro-batch.

    Raises:
        ConfigError: if something does. Names each module or parameter, and a replacement.
    """
    faults = list(_faults(module))
    if faults:
        raise ConfigError("these layers cannot be in a pipeline:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _faults(module: nn.Sequential) -> Iterator[str]:
    seen: set[int] = set()
    for path, inner in module.named_modules():
        if isinstance(inner, DistributedDataParallel):
            yield _reduces(path, inner)
    # Nothing is sharded before that was imported, with torchrec and fbgemm-gpu, which a pipeline does without.
    if "shardrec.modules.sharded_model" in sys.modules:
        yield from _sharded_faults(module, seen)
    for path, parameter in module.named_parameters():
        if id(parameter) not in seen and hasattr(parameter, "_in_backward_optimizers"):
            yield f"{path} has an optimizer in backward, {_UPDATES}"


def _sharded_faults(module: nn.Sequential, seen: set[int]) -> Iterator[str]:
    """The faults of modules made by :func:`shardrec.shard`. Records the parameters that were checked."""
    # With torchrec and fbgemm-gpu.
    from shardrec.modules.collection import ShardedCollection
    from shardrec.modules.sharded_model import ShardedModel

    for path, inner in module.named_modules():
        if isinstance(inner, ShardedModel) and inner.group is not None:
            yield _reduces(path, inner)
        if not isinstance(inner, ShardedCollection):
            continue
        for name in inner.fused_optimizers():
            yield f"table {name!r} of {path} has a fused optimizer, {_UPDATES}"
        for name, table in inner.tables().items():
            seen.update(map(id, table.parameters()))
            if table.layout.replicated and inner.context.collectives.world_size > 1:
                yield f"table {name!r} of {path} is replicated, and nothing in a stage reduces its gradients: cut it"


def _reduces(path: str, module: nn.Module) -> str:
    return (
        f"{path} ({type(module).__name__}) reduces gradients over ranks in the backward per micro-batch: put the "
        "plain module, or a ShardedEmbeddingBagCollection, into the stage"
    )


_UPDATES = "which would update it in each micro-batch: give it to an ordinary optimizer"
