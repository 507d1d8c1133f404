"""The flow of pending values through a TorchScript graph, as rules about their shapes.

The result is a :class:`Plan` of the graph, which says for each operand whether its node needs a plain value. This
module does not change the graph.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from shardrec._torchscript import Graph, Node, Type, Value, constant_int, writes_or_aliases
from shardrec.scripting.container_operators import Rule, rule_of
from shardrec.scripting.pending_types import Shape, has_optional, shape_of, solve

_CASTS = frozenset({"aten::_unwrap_optional", "prim::unchecked_cast", "prim::unchecked_unwrap_optional"})
_COMPARISONS_WITH_NONE = frozenset({"aten::__is__", "aten::__isnot__"})
_LITERALS = frozenset({"prim::DictConstruct", "prim::ListConstruct", "prim::TupleConstruct"})
_TUPLES = frozenset({"prim::TupleIndex", "prim::TupleUnpack"})
_NOTHING_HAPPENS = _LITERALS | {"prim::Constant", "prim::GetAttr"}


class Need(enum.Enum):
    """What a node needs of an operand."""

    VALUE = "the value and all that it holds, plain"
    HOLDER = "the value itself plain, what it holds as it is"
    AS_IS = "nothing"


Use: TypeAlias = Need | Shape
"""How a node uses an operand: what of it has to be there, or the place where it is stored, plain or pending as that."""


@dataclass(kw_only=True)
class NodePlan:
    """A node, how it uses its operands, and the blocks inside it.

    Args:
        is_lazy_item: whether it takes an item of a dict; if the dict is pending, the item can be pending.
    """

    node: Node
    uses: list[Use]
    is_lazy_item: bool = False
    blocks: list[Plan] = field(default_factory=list)


@dataclass(kw_only=True)
class Plan:
    """A block: its relevant nodes, in order, and how it passes its outputs on."""

    block: Graph
    nodes: list[NodePlan]
    outputs: list[Use]


class Flow:
    """Follows the pending values of a graph.

    Args:
        graph: with all calls inlined.
        pending: the values that an Await stands for. Each has the type of the value that it waits for, which is not an
            Optional: the Await of an Optional is not the Optional of an Await.

    Nodes that no pending value can reach are left out: of a graph with thousands of nodes few remain.

    Attributes:
        plan: of the graph's block.
        plain_types: per value, by its number in the graph: its type when nothing is pending.
        shapes: per value.
    """

    def __init__(self, graph: Graph, pending: Sequence[Value]) -> None:
        self.plain_types: dict[int, Type] = {}
        self.shapes: dict[int, Shape] = {}
        self._pending = {value.unique() for value in pending}
        starts = [self.shape(value) for value in pending]
        for start in starts:
            start.start()
        for value in graph.inputs():
            self.shape(value).pin()
        self._nodes = _nodes_for(pending)
        self.plan = self._block(graph.block())
        self.plan.outputs = [self._used(output, self.plan.block.returnNode(), 0) for output in graph.outputs()]
        solve(starts)

    def shape(self, value: Value) -> Shape:
        """The shape of a value of the graph."""
        number = value.unique()
        if number not in self.shapes:
            kind = self.plain_types.setdefault(number, value.type())
            self.shapes[number] = shape_of(kind)
        return self.shapes[number]

    def plain_type(self, value: Value) -> Type:
        """The type of a value when nothing is pending."""
        self.shape(value)
        return self.plain_types[value.unique()]

    def _block(self, block: Graph) -> Plan:
        nodes = [self._node(node) for node in block.nodes() if node in self._nodes]
        return Plan(block=block, nodes=nodes, outputs=[])

    def _node(self, node: Node) -> NodePlan:
        kind = node.kind()
        if kind == "prim::If":
            return self._if(node)
        if kind == "prim::Loop":
            return self._loop(node)
        return NodePlan(node=node, uses=self._operator(node, kind), is_lazy_item=_is_lazy_item(node))

    def _operator(self, node: Node, kind: str) -> list[Use]:
        inputs, outputs = list(node.inputs()), list(node.outputs())
        rule = rule_of(node)
        if rule is not None:
            return self._holder(node, rule)
        if kind in _LITERALS:
            return self._literal(node, kind)
        if kind == "prim::Uninitialized" or (kind == "prim::Constant" and outputs[0].type().kind() == "NoneType"):
            return []
        if kind in _CASTS:
            self.shape(outputs[0]).unite(self.shape(inputs[0]))
            return [Need.AS_IS]
        if kind in _COMPARISONS_WITH_NONE and any(value.type().kind() == "NoneType" for value in inputs):
            return [Need.AS_IS] * len(inputs)
        if kind in _TUPLES and self._take_apart(node, kind):
            return [Need.HOLDER, *[Need.VALUE] * (len(inputs) - 1)]
        for output in outputs:
            if output.unique() not in self._pending:
                self.shape(output).pin()
        return [self._used(value, node, index) for index, value in enumerate(inputs)]

    def _holder(self, node: Node, rule: Rule) -> list[Use]:
        inputs = list(node.inputs())
        holder = self.shape(inputs[0])
        element = holder.parts[0]
        uses: list[Use] = []
        for value, letter in zip(inputs, rule.arguments.ljust(len(inputs), "."), strict=False):
            if letter == "h":
                self.shape(value).share_parts(holder)
                uses.append(Need.HOLDER)
            else:
                uses.append(self._stored(value, element) if letter == "x" else Need.VALUE)
        for output in node.outputs():
            shape = self.shape(output)
            if _is_lazy_item(node):
                # Of a dict that is pending itself, the item can be pending as well.
                element.flow(shape)
                holder.flow_root(shape)
            elif rule.result == "e":
                shape.unite(element)
            elif rule.result == "h":
                shape.share_parts(holder)
            elif rule.result == "v":
                shape.parts[0].unite(element)
            elif rule.result == "i":
                shape.parts[0].parts[1].unite(element)
            else:
                shape.pin()
        return uses

    def _literal(self, node: Node, kind: str) -> list[Use]:
        inputs = list(node.inputs())
        parts = self.shape(node.output()).parts
        if kind == "prim::TupleConstruct":
            return [self._stored(value, part) for value, part in zip(inputs, parts, strict=True)]
        if kind == "prim::ListConstruct":
            return [self._stored(value, parts[0]) for value in inputs]
        return [self._stored(value, parts[0]) if index % 2 else Need.VALUE for index, value in enumerate(inputs)]

    def _take_apart(self, node: Node, kind: str) -> bool:
        holder, outputs = self.shape(node.inputsAt(0)), list(node.outputs())
        parts = holder.parts
        if kind == "prim::TupleIndex":
            index = constant_int(node.inputsAt(1))
            if index is None or not parts:
                return False
            parts = (parts[index],)
        if len(parts) != len(outputs):
            return False
        for part, output in zip(parts, outputs, strict=True):
            self.shape(output).unite(part)
        return True

    def _if(self, node: Node) -> NodePlan:
        blocks = [self._block(block) for block in node.blocks()]
        results = [self.shape(output) for output in node.outputs()]
        for plan in blocks:
            outputs = list(plan.block.outputs())
            plan.outputs = [self._stored(value, place) for value, place in zip(outputs, results, strict=True)]
        return NodePlan(node=node, uses=[Need.VALUE], blocks=blocks)

    def _loop(self, node: Node) -> NodePlan:
        block = next(iter(node.blocks()))
        # The inputs of the body are the counter and the carried values. Its outputs are whether to continue and the
        # carried values.
        carried = list(block.inputs())[1:]
        places = [self.shape(value) for value in carried]
        for place, output in zip(places, node.outputs(), strict=True):
            place.unite(self.shape(output))
        plan = self._block(block)
        first, later = list(node.inputs())[2:], list(block.outputs())[1:]
        plan.outputs = [Need.VALUE, *map(self._stored, later, places)]
        return NodePlan(node=node, uses=[Need.VALUE, Need.VALUE, *map(self._stored, first, places)], blocks=[plan])

    def _stored(self, value: Value, place: Shape) -> Shape:
        shape = self.shape(value)
        if self.plain_type(value).kind() == "OptionalType":
            # Between an Optional and its place no wait can stand, for want of an operator: they are the same.
            shape.unite(place)
        else:
            shape.flow(place)
        return place

    def _used(self, value: Value, node: Node, index: int) -> Need:
        """What is used as a whole is plain. What it holds, by a copy of it, unless that could be told from it."""
        shape, kind = self.shape(value), self.plain_type(value)
        if kind.kind() == "OptionalType":
            shape.pin()
        elif has_optional(kind) or (shape.parts and node.kind() != "prim::Return" and writes_or_aliases(node, index)):
            shape.pin_parts()
        elif _is_literal(value, node):
            # Made for this use: waiting for its inputs is not early, and saves the copy.
            for part in shape.parts:
                part.pin_itself()
        return Need.VALUE


def _nodes_for(pending: Sequence[Value]) -> set[Node]:
    """The nodes that use a value which may be, or hold, a pending one, or that make it, and the blocks that contain
    them."""
    values, nodes, todo = set(), set(), list(pending)
    while todo:
        value = todo.pop()
        if value.unique() in values:
            continue
        values.add(value.unique())
        for node in (value.node(), *(use.user for use in value.uses())):
            if node not in nodes:
                nodes.add(node)
                todo += _handed_on(node)
    for node in list(nodes):
        while (outer := node.owningBlock().owningNode()) is not None and outer not in nodes:
            nodes.add(node := outer)
    return nodes


def _handed_on(node: Node) -> list[Value]:
    """The values among which a node may hand on what is pending, or hold it."""
    kind = node.kind()
    if kind in ("prim::Param", "prim::Return"):
        outer = node.owningBlock().owningNode()
        return [] if outer is None else _handed_on(outer)
    if kind in ("prim::If", "prim::Loop"):
        inner = [value for block in node.blocks() for value in (*block.inputs(), *block.outputs())]
        return [*node.inputs(), *node.outputs(), *inner]
    takes_part = kind in _LITERALS or kind in _CASTS or kind in _TUPLES or rule_of(node) is not None
    return [*node.inputs(), *node.outputs()] if takes_part else []


def _is_lazy_item(node: Node) -> bool:
    """Whether a node takes an item of a dict, as ``LazyGetItemMixin`` does without waiting for the dict."""
    if node.kind() != "aten::__getitem__" or node.inputsAt(0).type().kind() != "DictType":
        return False
    return bool(node.output().type().kind() != "OptionalType")


def _is_literal(value: Value, use: Node) -> bool:
    """Whether a value is a list, dict or tuple that is written out where it is used, and used only there."""
    origin = value.node()
    if origin.kind() not in _LITERALS or len(value.uses()) > 1:
        return False
    node = use.prev()
    while node.kind() in _NOTHING_HAPPENS and node is not origin:
        node = node.prev()
    return bool(node is origin)
