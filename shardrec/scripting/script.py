"""``shardrec.script``: compiles a model to TorchScript, with waits as late as its data flow allows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardrec._torchscript import Graph, deferred_waits, generic_wait, inline, inlined, methods_of, quiet, subgraphs
from shardrec.errors import ConfigError
from shardrec.pending import wait
from shardrec.scripting.attributes import lift_attributes
from shardrec.scripting.error import ScriptError, explain
from shardrec.scripting.insert_waits import insert_waits
from shardrec.scripting.twins import scriptable_copy

_EXCHANGES = (
    "_c10d_functional::all_to_all_single",
    "_c10d_functional_autograd::all_to_all_single",
    "shardrec::issue_lookup",
)
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # torch.nn.parallel.DistributedDataParallel reads it


def script(model: nn.Module, *, portable: bool | None = None) -> torch.jit.ScriptModule:
    """Compile a model that holds sharded modules, or others that return pending values, with TorchScript.

    A sharded module issues its all-to-alls when it is called, and each value is waited for just before its first use,
    through variables, lists, dicts, tuples, branches, loops and calls: when a model first uses a result, all
    collectives that it issued before are in progress, as in eager mode.

    If the model is in training mode, the program is *live*: it runs in this process, has every feature of the eager
    model, and trains. Its parameters and buffers are the model's own. If the model is in eval mode, the program is
    *portable*: it is for inference, and ``torch.jit.save`` writes it to a file that needs neither shardrec nor Python.
    Its parameters share the model's memory and take no gradient (docs/scripting.md).

    Args:
        model: a model that TorchScript can compile, apart from modules that offer a ``scripted_twin()``. Its
            annotations say ``KeyedTensor``, not ``LazyAwaitable``. It is not changed.
        portable: whether the program is portable. Default: if ``model`` is in eval mode.

    Returns:
        The compiled model. Its ``forward`` returns plain values. The method ``issue`` of a module that was replaced
        by its twin returns the ``Await``.

    Raises:
        ScriptError: if TorchScript cannot compile the code, a sharded module is called in a fork on several ranks, or
            FSDP2 shards a module. Names the file, the line and a remedy.
        ConfigError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"shardrec.script takes an nn.Module, not {type(model).__name__}: put what is to be scripted into the "
            "forward of a module"
        )
    return compiled(model, portable=not model.training if portable is None else portable)


def compiled(model: nn.Module, *, portable: bool, overlap: bool = True) -> torch.jit.ScriptModule:
    """As :func:`script`. Without ``overlap``, values are waited for where they are made, for a model with collectives
    that take no time: its methods are not inlined, and its file loads in less than a tenth of the time."""
    _refuse_fsdp(model)
    copy = scriptable_copy(model, portable=portable)
    with generic_wait(wait), quiet():
        try:
            scripted: torch.jit.ScriptModule = torch.jit.script(copy)
        except Exception as error:  # of at least eight classes, depending on the construct that TorchScript rejects
            raise explain(type(model).__name__, error) from error
    move_waits(model, scripted, portable=portable, overlap=overlap)
    return scripted


def move_waits(model: nn.Module, scripted: torch.jit.ScriptModule, *, portable: bool, overlap: bool = True) -> None:
    """Move the waits in a compiled model from the calls of its twins to the first uses of their values.

    Args:
        model: what was scripted.
        scripted: is changed in place.
        portable: whether it reads the model's tables by itself. The collections are told.
        overlap: False leaves the waits where they are.

    Raises:
        ScriptError: if a sharded module is called in a fork on several ranks.
    """
    _refuse_forked_exchanges(scripted)
    # All are inlined before any is changed, since what is inlined is the called method as it is then.
    methods = methods_of(scripted) if overlap else ()
    graphs = [method.graph for method in methods if deferred_waits(inlined(method.graph))]
    for graph in graphs:
        inline(graph)
    for graph in graphs:
        insert_waits(graph)
    lift_attributes(scripted)
    _ignore_in_reducer(scripted, model)
    for module in model.modules() if portable else ():
        programs = getattr(module, "portable_programs", None)
        if isinstance(programs, WeakSet):
            programs.add(scripted)


def _refuse_forked_exchanges(scripted: torch.jit.ScriptModule) -> None:
    """Refuse a program that calls sharded modules inside of forks, if there are several ranks.

    A process group matches the collectives of its ranks by the order in which each rank issues them. Forks run on
    threads of TorchScript's, in an order that differs from rank to rank: gloo ends the process when sizes do not match,
    other backends mix the values of two modules. A fork would gain nothing: a sharded module's exchange is under way
    when its call returns.

    Raises:
        ScriptError: names the line of the fork and the remedy.
    """
    if not any(
        getattr(module, "group_name", "") or getattr(module, "collective", False) for module in scripted.modules()
    ):
        return
    for method in methods_of(scripted):
        for fork in method.graph.findAllNodes("prim::fork"):
            if _exchanges(fork.g("Subgraph").copy()):
                raise ScriptError(
                    f"a sharded module is called inside of a fork:\n{fork.sourceRange()}\nForks run in another order "
                    "on each rank, and the ranks' exchanges would not match. Call the module without torch.jit.fork: "
                    "its exchange is under way when the call returns, and is waited for at the first use of its value"
                )


def _refuse_fsdp(model: nn.Module) -> None:
    """Raise a ScriptError for a module that FSDP2 shards: TorchScript would run none of its hooks."""
    path = next((path for path, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if path is not None:
        raise ScriptError(
            f"module {path!r} of {type(model).__name__} is sharded by FSDP2, which TorchScript does not know: shard "
            "the model with dense='ddp', or use torch.compile"
        )


def _exchanges(graph: Graph) -> bool:
    inline(graph)
    if any(graph.findAllNodes(kind) for kind in _EXCHANGES):
        return True
    return any(_exchanges(inner.copy()) for inner in subgraphs(graph))


def _ignore_in_reducer(scripted: torch.jit.ScriptModule, model: nn.Module) -> None:
    """Mark the scripted model so that ``DistributedDataParallel(scripted)`` reduces no parameter that differs by rank.

    Args:
        scripted: holds the parameters of ``model``, some under several names.
        model: what was scripted. The ``unreduced_parameters()`` of its modules, where they have such a method, are not
            averaged over the ranks.
    """
    unreduced = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, _HasUnreduced)
        for parameter in module.unreduced_parameters()
    }
    if unreduced:
        named = scripted.named_parameters(remove_duplicate=False)
        setattr(scripted, _IGNORED, [name for name, parameter in named if id(parameter) in unreduced])


@runtime_checkable
class _HasUnreduced(Protocol):
    def unreduced_parameters(self) -> Iterable[nn.Parameter]: ...
