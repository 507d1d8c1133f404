"""How torch.compile treats the sharded modules of a model, and the marks that control it.

[Note: two modes]
``boundary``: a sharded module's call and the first use of its value are graph breaks: the lookup runs eagerly,
with everything that the eager model has (one exchange for several modules, shared memory between the ranks of a host,
quantized comms, a batch size per feature), and compiled dense code before the first use overlaps with the exchange. A
model with n sharded calls becomes n + 1 dense regions.

``traced``: no break. The tracer runs the module's twin of operators (:mod:`shardrec.modules.live_twins`), so that a
whole model is one graph and ``fullgraph=True`` holds. Its calls go through the eager model's queue, so they share
exchanges and transport.

[Note: the marks]
By ``_is_fsdp_managed_module`` and ``_fsdp_use_orig_params``, FSDP tells dynamo that a module's parameters change, so
that dynamo takes them as inputs and does not guard the module's attributes; without the second, dynamo raises an error.
This holds for sharded tables: kernels write them in backward, and a checkpoint or a replica's average between steps.
Their effect in torch 2.13 was measured (docs/design.md): no graph break, and no change in guards at a module that is a
break anyway; in a traced module 19 of 516 guards fewer, but with ``dynamic=True`` each number of the module becomes an
input of the graph. So in boundary mode sharded modules and their submodules are marked. The dense part is never marked:
torch releases that drop guards on marked modules would not notice ``eval()``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from torch import nn

from shardrec._torchscript import plain
from shardrec.errors import ConfigError
from shardrec.lookup.fakes import register_fakes
from shardrec.modules.collection import ShardedCollection

CompileMode = Literal["boundary", "traced"]
"""What torch.compile does at a sharded module. See the notes above."""

_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")


def annotate_for_dynamo(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] = (),
    use_orig_params: bool = True,
    *,
    mode: CompileMode = "boundary",
) -> None:
    """Tell torch.compile what to do at the sharded modules in ``module``; :func:`shardrec.shard` does so.

    Idempotent. A second call may change the mode, which applies to later compilations. It does not affect eager calls,
    TorchScript and export. The parameters before ``mode`` match FSDP's ``_annotate_modules_for_dynamo``, in its
    order. On torch 2.13 the marks cause no graph break. The module's docstring describes their effect.

    Args:
        module: a model, or a sharded module by itself.
        ignored_modules: modules that are not marked, nor their submodules.
        use_orig_params: FSDP's option of this name, which dynamo requires.
        mode: ``"boundary"`` runs lookups eagerly, at graph breaks. ``"traced"`` includes them in the graph.

    Raises:
        ConfigError: for an unknown mode; without ``use_orig_params``; for a module that holds nothing sharded.
    """
    if mode not in get_args(CompileMode):
        raise ConfigError(f"mode is {mode!r}. Give one of {', '.join(map(repr, get_args(CompileMode)))}")
    if not use_orig_params:
        raise ConfigError(
            "use_orig_params is False, and dynamo refuses managed modules without it: parameters would have to be "
            "views of flat ones. Leave it True, which is how sharded modules are made"
        )
    collections = _collections(module)
    if not collections:
        raise ConfigError(
            f"{type(module).__name__} holds no sharded collection, so there is nothing to mark: annotate the model "
            "that shardrec.shard returned"
        )
    ignored = {id(inner) for ignored_module in ignored_modules for inner in ignored_module.modules()}
    annotated = [collection for collection in collections if id(collection) not in ignored]
    # All the twins before the first mark: one that cannot be made must not leave half of a model annotated.
    # A second twin of a module would be compiled again.
    twins = [
        (collection._traced or plain(collection.scripted_twin())) if mode == "traced" else None
        for collection in annotated
    ]
    if mode == "traced":
        register_fakes()  # for modules that a user traces beside it: fbgemm's, and twins made for other executors
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
    """Undo :func:`annotate_for_dynamo`: remove every mark that it made, and make sharded modules graph breaks again.

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
    return [child for child in module.modules() if isinstance(child, ShardedCollection)]
