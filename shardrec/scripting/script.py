"""``shardrec.script``: compiles a model to TorchScript, with waits as late as its data flow allows."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import nn

from shardrec._torchscript import deferred_waits, generic_wait, inline, inlined, methods_of, quiet
from shardrec.errors import ConfigError
from shardrec.pending import wait
from shardrec.scripting.attributes import lift_attributes
from shardrec.scripting.error import explain
from shardrec.scripting.forks import refuse_forked_exchanges
from shardrec.scripting.insert_waits import insert_waits
from shardrec.scripting.reducer import ignore_in_reducer
from shardrec.scripting.twins import scriptable_copy

__all__ = ["compiled", "move_waits", "script"]


def script(model: nn.Module, *, parallel_lookups: bool = False, portable: bool | None = None) -> torch.jit.ScriptModule:
    """Compile a model that holds sharded modules, or others that return pending values, with TorchScript.

    A sharded module issues its all-to-alls when it is called, and each value is waited for just before its first use,
    through variables, lists, dicts, tuples, branches, loops and calls: when a model first uses a result, all
    collectives that it issued before are in progress, as in eager mode.

    If the model is in training mode, the program is *live*: it runs in this process, has every feature of the eager
    model, and trains; its parameters and buffers are the model's own. If the model is in eval mode, the program is
    *portable*: it is for inference, and ``torch.jit.save`` writes it to a file that needs neither shardrec nor Python.
    Its parameters share the model's memory and take no gradient (docs/executors.md).

    Args:
        model: a model that TorchScript can compile, apart from modules that offer a ``scripted_twin()``; its
            annotations say ``KeyedTensor``, not ``LazyAwaitable``. It is not changed.
        parallel_lookups: a portable program runs the lookups of independent table groups of bags as forks, on
            TorchScript's inter-op threads.
        portable: whether the program is portable. Default: if ``model`` is in eval mode.

    Returns:
        The compiled model. Its ``forward`` returns plain values; the method ``issue`` of a module that was replaced
        by its twin returns the ``Await``.

    Raises:
        ScriptError: if TorchScript cannot compile the code, or a sharded module is called in a fork on several ranks;
            names the file, the line and a remedy.
        ConfigError: if ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"shardrec.script takes an nn.Module, not {type(model).__name__}: put what is to be scripted into the "
            "forward of a module"
        )
    portable = not model.training if portable is None else portable
    return compiled(model, portable=portable, parallel_lookups=parallel_lookups)


def compiled(
    model: nn.Module, *, portable: bool, parallel_lookups: bool = False, overlap: bool = True
) -> torch.jit.ScriptModule:
    """As :func:`script`; without ``overlap`` values are waited for where they are made, for a model whose collectives
    take no time: its methods are not inlined, and its file loads in less than a tenth of the time."""
    copy = scriptable_copy(model, portable=portable, parallel_lookups=parallel_lookups)
    with generic_wait(wait), quiet():
        try:
            scripted: torch.jit.ScriptModule = torch.jit.script(copy)
        except Exception as error:  # of eight classes at least, by what TorchScript does not like
            raise explain(type(model).__name__, error) from error
    move_waits(model, scripted, portable=portable, overlap=overlap)
    return scripted


def move_waits(model: nn.Module, scripted: torch.jit.ScriptModule, *, portable: bool, overlap: bool = True) -> None:
    """Move the waits in a compiled model from the calls of its twins to the first uses of their values.

    Args:
        model: what was scripted.
        scripted: is changed in place.
        portable: whether it reads the model's tables by itself, of which these are told.
        overlap: False leaves the waits where they are.

    Raises:
        ScriptError: if a sharded module is called in a fork on several ranks.
    """
    refuse_forked_exchanges(scripted)
    # All are inlined before any is changed, since what is inlined is the called method as it is then.
    methods = methods_of(scripted) if overlap else ()
    graphs = [method.graph for method in methods if deferred_waits(inlined(method.graph))]
    for graph in graphs:
        inline(graph)
    for graph in graphs:
        insert_waits(graph)
    lift_attributes(scripted)
    ignore_in_reducer(scripted, model)
    for module in model.modules() if portable else ():
        programs = getattr(module, "portable_programs", None)
        if isinstance(programs, WeakSet):
            programs.add(scripted)
