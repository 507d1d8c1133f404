"""What a stage must not hold: what acts on the gradients of one micro-batch as if they were those of the mini-batch."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardrec.errors import ConfigError
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.model import ShardedModel

__all__ = ["check_layers"]


def check_layers(module: nn.Sequential) -> None:
    """Check that nothing in a sequential reduces gradients, or updates weights, at each micro-batch.

    Raises:
        ConfigError: naming each module or parameter that does, and what to use instead.
    """
    faults = list(_faults(module))
    if faults:
        raise ConfigError("these layers cannot be in a pipeline:\n" + "\n".join(f"  - {fault}" for fault in faults))


def _faults(module: nn.Sequential) -> Iterator[str]:
    seen: set[int] = set()
    for path, inner in module.named_modules():
        kind = type(inner).__name__
        if isinstance(inner, DistributedDataParallel) or (isinstance(inner, ShardedModel) and inner.group is not None):
            yield (
                f"{path} ({kind}) reduces gradients over ranks in the backward of each micro-batch: put the plain "
                "module, or a ShardedEmbeddingBagCollection, into the stage"
            )
        if not isinstance(inner, ShardedCollection):
            continue
        for name in inner.fused_optimizers():
            yield f"table {name!r} of {path} has a fused optimizer, {_UPDATES}"
        for name, table in inner.tables().items():
            seen.update(map(id, table.parameters()))
            if table.layout.replicated and inner.context.collectives.world_size > 1:
                yield f"table {name!r} of {path} is replicated, and nothing in a stage reduces its gradients: cut it"
    for path, parameter in module.named_parameters():
        if id(parameter) not in seen and hasattr(parameter, "_in_backward_optimizers"):
            yield f"{path} has an optimizer in backward, {_UPDATES}"


_UPDATES = "which would update it in each micro-batch: give it to an ordinary optimizer"
