"""What torch.compile does with the sharded modules of a model, and the marks that tell it.

[Note: two modes]
``boundary``: a sharded module's call is a graph break, and so is the first use of its value: the lookup runs eagerly,
with everything that the eager model has (one exchange for several modules, shared memory between the ranks of a host,
quantized comms, a batch size per feature), and compiled dense code before the first use overlaps with the exchange. A
model with n sharded calls becomes n + 1 dense regions.

``traced``: no break. The tracer runs the module's twin of operators (:mod:`shardrec.modules.live_twins`), so that a
whole model is one graph and ``fullgraph=True`` holds. Its calls go through the eager model's queue, so they share
exchanges and transport.

[Note: the marks]
``_is_fsdp_managed_module`` and ``_fsdp_use_orig_params`` are FSDP's words to dynamo: this module's parameters change
under you, take them as inputs and do not guard what you read from it; without the second, dynamo refuses. That is so
for our tables: kernels write them in backward, a checkpoint or a replica's average between steps. What torch 2.13 makes
of them was measured (docs/compile.md): no break, and no guard less at a module that is a break anyway; in a traced
module 19 of 516 guards less, but with ``dynamic=True`` each number of the module becomes an input of the graph. So they
are put on sharded modules, and on what is in them, in boundary mode. They are never put on the dense part: torch
releases that leave out guards at marked modules would not notice ``eval()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from torch import nn

from shardrec._torchscript import plain
from shardrec.errors import ConfigError
from shardrec.lookup.fakes import register_fakes
from shardrec.modules.collection import ShardedCollection

__all__ = ["CompileMode", "annotate_for_dynamo", "unannotate"]

CompileMode = Literal["boundary", "traced"]
"""What torch.compile does at a sharded module; see the notes above."""

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def annotate_for_dynamo(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] = (),
    use_orig_params: bool = True,
    *,
    mode: CompileMode = "boundary",
) -> None:
    """Tell torch.compile what to do at the sharded modules in ``module``; :func:`shardrec.shard` does so.

    Idempotent; a second call may change the mode, which holds for what is compiled afterwards. Eager calls, TorchScript
    and export do not see it. The parameters before ``mode`` are those of FSDP's ``_annotate_modules_for_dynamo``, in
    its order. On torch 2.13 the marks move no graph break; see the notes above for what each does.

    Args:
        module: a model, or a sharded module by itself.
        ignored_modules: these and what is in them stay as they are.
        use_orig_params: as FSDP's option of this name, which dynamo asks for.
        mode: ``"boundary"`` runs lookups eagerly, at graph breaks; ``"traced"`` takes them into the graph.

    Raises:
        ConfigError: for an unknown mode; without ``use_orig_params``; for a module that holds nothing sharded.
    """
    if mode not in get_args(CompileMode):
        raise ConfigError(f"mode is {mode!r}; give one of {', '.join(map(repr, get_args(CompileMode)))}")
    if not use_orig_params:
        raise ConfigError(
            "use_orig_params is False, and dynamo refuses managed modules without it: parameters would have to be "
            "views of flat ones; leave it True, which is how sharded modules are made"
        )
    collections = _collections(module)
    if not collections:
        raise ConfigError(
            f"{type(module).__name__} holds no sharded collection, so there is nothing to mark: annotate the model "
            "that shardrec.shard returned"
        )
    ignored = {id(inner) for one in ignored_modules for inner in one.modules()}
    annotated = [one for one in collections if id(one) not in ignored]
    # All the twins before the first mark: one that cannot be made must not leave half of a model annotated.
    # A second twin of a module would be compiled anew.
    twins = [(one._traced or plain(one.scripted_twin())) if mode == "traced" else None for one in annotated]
    if mode == "traced":
        register_fakes()  # for what a user traces beside it: fbgemm's modules, and twins made for other executors
    for collection, twin in zip(annotated, twins, strict=True):
        _forget(collection)
        if twin is not None:
            object.__setattr__(collection, "_traced", twin)
            continue
        for inner in collection.modules():
            if id(inner) not in ignored:
                for mark in _MARKS:
                    object.__setattr__(inner, mark, True)


def unannotate(module: nn.Module) -> None:
    """Undo :func:`annotate_for_dynamo`: every mark that it made goes, and sharded modules are graph breaks again.

    Args:
        module: a model, or a sharded module by itself. Marks that FSDP itself has set on other modules stay.
    """
    for collection in _collections(module):
        _forget(collection)


def _forget(sharded: nn.Module) -> None:
    vars(sharded).pop("_traced", None)
    for inner in sharded.modules():
        for mark in _MARKS:
            vars(inner).pop(mark, None)


def _collections(module: nn.Module) -> list[ShardedCollection]:
    return [one for one in module.modules() if isinstance(one, ShardedCollection)]
