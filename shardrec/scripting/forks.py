"""Rejects forks that contain exchanges.

A process group matches the collectives of its ranks by the order in which each rank issues them. Forks run on threads
of TorchScript's, in an order that differs from rank to rank: gloo ends the process when sizes do not match, other
backends mix the values of two modules. A fork would gain nothing: a sharded module's exchange is under way when its
call returns.
"""

from __future__ import annotations

import torch

from shardrec._torchscript import Graph, inline, methods_of, subgraphs
from shardrec.scripting.error import ScriptError

__all__ = ["refuse_forked_exchanges"]

_EXCHANGES = (
    "_c10d_functional::all_to_all_single",
    "_c10d_functional_autograd::all_to_all_single",
    "shardrec::issue_lookup",
)


def refuse_forked_exchanges(scripted: torch.jit.ScriptModule) -> None:
    """Refuse a program that calls sharded modules inside of forks, if there are several ranks.

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


def _exchanges(graph: Graph) -> bool:
    inline(graph)
    if any(graph.findAllNodes(kind) for kind in _EXCHANGES):
        return True
    return any(_exchanges(inner.copy()) for inner in subgraphs(graph))
