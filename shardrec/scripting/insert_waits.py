"""Inserts waits into a TorchScript graph, each just before the first use of its value."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import MutableMapping

import torch

from shardrec._torchscript import Graph, Node, Type, Value, await_type, deferred_waits
from shardrec.scripting.flow import Flow, Need, NodePlan, Plan, Use
from shardrec.scripting.pending_types import Shape, pending_type

# Per pending value, by its number: what the wait gave, where that is known to have run.
_Waited = MutableMapping[int, Value]


def insert_waits(graph: Graph) -> None:
    """Moves each deferred wait of a graph to where the value is used.

    Args:
        graph: with all calls inlined. Is changed.
    """
    pending = []
    for inner, outer in deferred_waits(graph):
        kind = outer.output().type()
        # The Await of an Optional is not an Optional of an Await: it is waited for immediately.
        if kind.kind() != "OptionalType":
            value = inner.output()
            outer.output().replaceAllUsesWith(value)
            outer.destroy()
            # As the program sees it. The placing below tells it what it is again.
            value.setType(kind)
            pending.append(value)
    if pending:
        _Placing(graph, Flow(graph, pending)).run()
        assert all(value.type().kind() == "AwaitType" for value in pending), "what is deferred stays an Await"
    _drop_marks(graph)


def _drop_marks(graph: Graph) -> None:
    """Remove the marks of deferred waits, and ``shardrec.wait(value)``, before which a wait was inserted."""
    for nowait in graph.findAllNodes("prim::awaitable_nowait"):
        uses = nowait.output().uses()
        if len(uses) == 1 and uses[0].user.kind() == "prim::awaitable_wait":
            wait = uses[0].user
            wait.output().replaceAllUsesWith(nowait.inputsAt(0))
            wait.destroy()
            nowait.destroy()


class _Placing:
    def __init__(self, graph: Graph, flow: Flow) -> None:
        self._graph = graph
        self._flow = flow

    def run(self) -> None:
        for value in self._values(self._flow.plan):
            kind, shape = self._flow.plain_type(value), self._flow.shape(value)
            if shape.is_pending or shape.holds_pending:
                value.setType(pending_type(kind, shape))
        self._block(self._flow.plan, {})

    def _values(self, plan: Plan) -> list[Value]:
        values = list(plan.block.inputs())
        for node_plan in plan.nodes:
            values += node_plan.node.outputs()
            for inner in node_plan.blocks:
                values += self._values(inner)
        return values

    def _block(self, plan: Plan, waited: _Waited) -> None:
        for node_plan in plan.nodes:
            self._node(node_plan, waited)
        self._operands(plan.block.returnNode(), plan.outputs, waited)

    def _node(self, plan: NodePlan, waited: _Waited) -> None:
        node = plan.node
        if plan.is_lazy_item and all(self._flow.shape(each).is_pending for each in (node.inputsAt(0), node.output())):
            self._item_of_pending(node)
            return
        self._operands(node, plan.uses, waited)
        for block in plan.blocks:
            # What has been waited for inside a block has not been outside it.
            self._block(block, ChainMap({}, waited))

    def _operands(self, node: Node, uses: list[Use], waited: _Waited) -> None:
        for index, use in enumerate(uses):
            value = node.inputsAt(index)
            fitting = self._fit(value, use, node, waited)
            if fitting is not value:
                node.replaceInput(index, fitting)

    def _fit(self, value: Value, use: Use, before: Node, waited: _Waited) -> Value:
        """The value as a node needs it."""
        if use is Need.AS_IS:
            return value
        shape, kind = self._flow.shape(value), self._flow.plain_type(value)
        if isinstance(use, Shape) and use.is_pending:
            return value if shape.is_pending else self._as_pending(value, kind, before)
        if shape.is_pending:
            return self._wait(value, kind, before, waited)
        return self._plain_copy(value, kind, shape, before) if use is Need.VALUE else value

    def _wait(self, value: Value, kind: Type, before: Node, waited: _Waited) -> Value:
        number = value.unique()
        if number not in waited:
            waited[number] = self._insert("prim::awaitable_wait", [value], kind, before)
        return waited[number]

    def _as_pending(self, value: Value, kind: Type, before: Node) -> Value:
        if kind.kind() == "NoneType":
            return value
        return self._insert("prim::awaitable_nowait", [value], await_type(kind), before)

    def _item_of_pending(self, node: Node) -> None:
        """Replaces ``wait(dict)[key]`` by an Await that does this when it is waited for."""
        item = self._flow.plain_type(node.output())
        body: Graph = torch._C.Graph()
        holder, key = body.addInput("holder"), body.addInput("key")
        holder.setType(node.inputsAt(0).type())
        key.setType(node.inputsAt(1).type())
        wait = body.create("prim::awaitable_wait", [holder], 1)
        wait.output().setType(self._flow.plain_type(node.inputsAt(0)))
        take = body.create("aten::__getitem__", [wait.output(), key], 1)
        take.output().setType(item)
        for each in (wait, take):
            each.copyMetadata(node)
            body.appendNode(each)
        body.registerOutput(take.output())
        later = self._graph.create("prim::awaitable", list(node.inputs()), 1)
        later.copyMetadata(node)
        later.g_("Subgraph", body)
        later.output().setType(await_type(item))
        later.insertBefore(node)
        # Under the number that the flow knows.
        self._flow.shapes[later.output().unique()] = self._flow.shape(node.output())
        self._flow.plain_types[later.output().unique()] = item
        node.output().replaceAllUsesWith(later.output())
        node.destroy()

    def _plain_copy(self, value: Value, kind: Type, shape: Shape, before: Node) -> Value:
        """A list, dict or tuple like ``value`` in which everything has been waited for."""
        if shape.is_pending:
            return self._insert("prim::awaitable_wait", [value], kind, before)
        if not shape.holds_pending:
            return value
        if kind.kind() == "TupleType":
            return self._plain_tuple(value, kind, shape, before)
        is_dict = kind.kind() == "DictType"
        element = kind.getValueType() if is_dict else kind.getElementType()
        part = shape.parts[0]
        copy = self._insert("prim::DictConstruct" if is_dict else "prim::ListConstruct", [], kind, before)
        keys = value
        if is_dict:
            keys = self._insert("aten::keys", [value], torch._C.ListType(kind.getKeyType()), before)
        number = self._insert("aten::len", [keys], torch._C.IntType.get(), before)
        true = self._constant(True, before)
        loop = self._create("prim::Loop", [number, true], 0, before)
        body = loop.addBlock()
        index = body.addInputToBlock()
        index.setType(torch._C.IntType.get())
        body.registerOutput(true)
        end = body.returnNode()
        if is_dict:
            index = self._insert("aten::__getitem__", [keys, index], kind.getKeyType(), end)
        item = self._insert("aten::__getitem__", [value, index], pending_type(element, part), end)
        plain = self._plain_copy(item, element, part, end)
        if is_dict:
            self._create("aten::_set_item", [copy, index, plain], 0, end)
        else:
            self._insert("aten::append", [copy, plain], kind, end)
        return copy

    def _plain_tuple(self, value: Value, kind: Type, shape: Shape, before: Node) -> Value:
        items = []
        for index, (item, part) in enumerate(zip(kind.elements(), shape.parts, strict=True)):
            place = self._constant(index, before)
            component = self._insert("prim::TupleIndex", [value, place], pending_type(item, part), before)
            items.append(self._plain_copy(component, item, part, before))
        return self._insert("prim::TupleConstruct", items, kind, before)

    def _constant(self, value: bool | int, before: Node) -> Value:
        with self._graph.insert_point_guard(before):
            return self._graph.insertConstant(value)

    def _insert(self, kind: str, inputs: list[Value], result: Type, before: Node) -> Value:
        node = self._create(kind, inputs, 1, before)
        node.output().setType(result)
        return node.output()

    def _create(self, kind: str, inputs: list[Value], outputs: int, before: Node) -> Node:
        node = self._graph.create(kind, inputs, outputs)
        node.copyMetadata(_with_line(before))
        node.insertBefore(before)
        return node


def _with_line(before: Node) -> Node:
    """Whose line an error inside a wait is reported at: the user's that needed the value.

    Not every node has a line. A node that takes an attribute lacks it, and the end of a block has the last node's line.
    """
    if before.kind() == "prim::Return":
        return before.prev()
    if before.sourceRange():
        return before
    from_there = itertools.dropwhile(lambda node: node is not before, before.owningBlock().nodes())
    return next((node for node in from_there if node.sourceRange()), before)
