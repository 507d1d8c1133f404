"""What awaitables and forks need of a module, read outside of them.

``torch.jit.freeze`` puts constants in the place of a program's attributes, but not inside of awaitables, nor in all
that a fork may hold, and then drops attributes and methods: ``awaitable(self.method, x)`` would fail where it is waited
for, and ``fork(self.sharded, x)`` immediately. So the attributes become arguments::

    %a = prim::awaitable(%self, %x)                  %w = prim::GetAttr[name="w"](%self)
      where: %w = prim::GetAttr[name="w"](%self)     %a = prim::awaitable(%x, %w)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardrec._torchscript import Graph, Node, inline, methods_of

_GET, _SET = "prim::GetAttr", "prim::SetAttr"


def lift_attributes(scripted: torch.jit.ScriptModule) -> None:
    """Read the attributes that awaitables and forks use before these are made; not those that the program sets."""
    graphs = [method.graph for method in methods_of(scripted) if method.name != "__setstate__"]
    changed = {node.s("name") for graph in graphs for node in graph.findAllNodes(_SET)}
    for graph in graphs:
        _lift(graph, changed)


def _lift(graph: Graph, changed: set[str]) -> None:
    for kind in ("prim::awaitable", "prim::fork"):
        for node in graph.findAllNodes(kind):
            body = node.g("Subgraph")
            if any(_is_object(value) for value in body.inputs()):
                inline(body)
                _lift(body, changed)
                while reads := [read for read in _reads(body) if read.s("name") not in changed]:
                    _to_argument(graph, node, body, reads[0])
                _drop_unused(node, body)


def _is_object(value: torch._C.Value) -> bool:
    return bool(value.type().kind() == "ClassType")


def _reads(body: Graph) -> Iterator[Node]:
    """Where attributes of the arguments are read, the outermost blocks first."""
    argument_numbers = {value.unique() for value in body.inputs()}
    return (read for read in body.findAllNodes(_GET) if read.inputsAt(0).unique() in argument_numbers)


def _to_argument(graph: Graph, node: Node, body: Graph, read: Node) -> None:
    """Read the attribute before the awaitable, and hand it in."""
    owner = [value.unique() for value in body.inputs()].index(read.inputsAt(0).unique())
    outside = graph.create(_GET, [node.inputsAt(owner)], 1)
    outside.s_("name", read.s("name"))
    outside.copyMetadata(node)
    outside.output().setType(read.output().type())
    outside.insertBefore(node)
    node.addInput(outside.output())
    argument = body.addInput()
    argument.setType(read.output().type())
    read.output().replaceAllUsesWith(argument)
    read.destroy()


def _drop_unused(node: Node, body: Graph) -> None:
    for number, value in reversed(list(enumerate(body.inputs()))):
        if _is_object(value) and not value.uses():
            node.removeInput(number)
            body.eraseInput(number)
