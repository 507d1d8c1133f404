"""Every workaround that TorchScript needs, each with its reason. The rest of shardrec goes through here.

Nothing here changes torch: no function of it is replaced, no setting is left behind. What is used beyond the documented
interface is the Python view of TorchScript's graphs and the table of functions that compile to an operator, which have
been the same since torch 2.0.
"""

from __future__ import annotations

import linecache
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import FunctionModifiers
from torch.jit import _builtins, _state

# torch gives these no importable names that a type checker knows.
Graph = Any
Node = Any
Type = Any
Value = Any

_CALL = "prim::CallFunction"
_NOWAIT = "prim::awaitable_nowait"
_WAIT = "prim::awaitable_wait"

# One compilation with generic_wait() at a time: the table of functions that compile to an operator is torch's.
_LOCK = threading.RLock()


@contextmanager
def quiet() -> Iterator[None]:
    """Silences two warnings of torch while shardrec itself calls TorchScript: the advice not to use TorchScript, and a
    note about annotations such as ``torch.IntTensor``.

    torch gives the advice at each call of ``torch.jit.script`` since 2.9 or so. A user of ``shardrec.script`` has
    decided already. The note is about TorchRec's KeyedJaggedTensor, which a user cannot change.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchScript will treat type annotations of Tensor", UserWarning)
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is (deprecated|not supported)", DeprecationWarning)
        yield


def after_script(module: nn.Module, then: Callable[[torch.jit.ScriptModule], None]) -> None:
    """Has ``torch.jit.script(module)`` call ``then`` with the compiled module, before it returns it.

    torch lacks such a hook. But before it compiles, it binds a module's unused methods to the compiled module, which
    shows that module, and it asks for ``dir(module)`` once more at the end. The class of ``module`` is changed.
    """
    scripted: list[torch.jit.ScriptModule] = []

    class Binding:
        _torchscript_modifier = FunctionModifiers.UNUSED

        def __get__(self, instance: nn.Module | None, owner: type | None = None) -> object:
            if isinstance(instance, torch.jit.ScriptModule):
                scripted.append(instance)
            return self if instance is None else MethodType(self, instance)

        def __call__(self, instance: nn.Module) -> None:
            """Nothing: only its binding is of interest."""

    def names(self: nn.Module) -> list[str]:
        if scripted and "forward" in vars(scripted[0]):
            then(scripted.pop())
            scripted.clear()
        return [*old.__dir__(self)]

    # The name and the module of a class are in the name of its TorchScript type.
    old = type(module)
    members = {"__module__": old.__module__, "__dir__": names, "_binding": Binding()}
    module.__class__ = type(old.__name__, (old,), members)


def compiles_to(function: Callable[..., object], operator: str) -> None:
    """Has TorchScript compile calls of ``function`` to ``operator``.

    A Python function with type variables cannot be compiled: TorchScript lacks them, except in the schemas of its own
    operators. ``torch.jit.wait`` gets to ``aten::wait`` by the same table.
    """
    _builtins._register_builtin(function, operator)


def await_type(value: Type) -> Type:
    """``Await[value]``, in TorchScript's types."""
    return torch._C.AwaitType(value)


def compiled_nowait(value: object) -> Any | None:
    """An Await of ``value`` that compiled code accepts, or None if TorchScript lacks a type for it.

    One that is made in Python, ``torch.jit._awaitable_nowait(value)``, is an ``Await`` of an unknown Python object, and
    compiled code that is given it stops with "Expected Tensor but got PyObject". So it is made by a compiled function.
    """
    inferred = torch._C._jit_try_infer_type(value)
    if not inferred.success():
        return None
    graph: Graph = torch._C.Graph()
    argument = graph.addInput("value")
    argument.setType(inferred.type())
    nowait = graph.create(_NOWAIT, [argument], 1)
    nowait.output().setType(await_type(inferred.type()))
    graph.appendNode(nowait)
    graph.registerOutput(nowait.output())
    return torch._C._create_function_from_graph("nowait", graph)(value)


def defer(pending: str) -> str:
    """The value of an ``Await``, in a spelling that says: wait for it later, where it is used.

    An operator of shardrec's own could not be told about type variables, and a saved file would need shardrec to be
    loaded. So the mark is made of torch's operators: waiting for an Await of an Await that is there already, and then
    for that. It has its usual meaning if no other code looks for it.

    Args:
        pending: an expression, of source that TorchScript will read and in which ``torch`` is known.
    """
    return f"torch.jit._awaitable_wait(torch.jit._awaitable_wait(torch.jit._awaitable_nowait({pending})))"


def deferred_waits(graph: Graph) -> list[tuple[Node, Node]]:
    """The two waits of each :func:`defer` in a graph, its inner blocks included, in order.

    The first one's output is the Await, and the second one's is its value.
    """
    pairs = []
    for nowait in graph.findAllNodes(_NOWAIT):
        if nowait.inputsAt(0).type().kind() != "AwaitType":
            continue
        inner = _only_user(nowait)
        outer = inner and inner.kind() == _WAIT and _only_user(inner)
        if outer and outer.kind() == _WAIT:
            pairs.append((inner, outer))
    return pairs


def _only_user(node: Node) -> Node | None:
    uses = node.output().uses()
    return uses[0].user if len(uses) == 1 else None


# [Note: one wait for three kinds of values]
# ``shardrec.wait`` takes an Await, a Future or a plain value. Among TorchScript's operators no single one does, and
# operators registered from Python cannot have type variables. Compiled *functions* can, if they are made from a graph
# in text instead of from Python; and a Python function can stand for several of them, as torch.nn.functional's
# overloads do. Running such a function does not work (inlining keeps "t" as the type of its result), so the calls are
# replaced by operators before anything runs. TorchScript has worked out their types by then.
_WAIT_OVERLOADS = {
    "__torch__.shardrec.wait_for_await": "graph(%pending : Await(t)):\n  %1 : t = prim::awaitable_wait(%pending)\n"
    "  return (%1)",
    "__torch__.shardrec.wait_for_future": "graph(%pending : Future(t)):\n  %1 : t = aten::wait(%pending)\n"
    "  return (%1)",
    "__torch__.shardrec.wait_for_value": "graph(%pending : t):\n  return (%pending)",
}


@contextmanager
def generic_wait(wait: Callable[..., object]) -> Iterator[None]:
    """Inside, ``wait`` compiles for an Await, a Future and a plain value. Outside, as :func:`compiles_to` was told.

    On leaving, also by an error, everything that has been compiled inside is made of torch's operators again.
    """
    with _LOCK:
        unit: Any = _state._python_cu
        overloads = [
            unit.find_function(name) or unit.create_function(name, torch._C.parse_ir(text))
            for name, text in _WAIT_OVERLOADS.items()
        ]
        before = {function.qualified_name for function in unit.get_functions()}
        _state._set_jit_overload_cache(wait, overloads)
        table = _builtins._get_builtin_table()
        operator = table.pop(id(wait))
        try:
            yield
        finally:
            table[id(wait)] = operator
            del _state._jit_function_overload_caching[wait]
            for function in unit.get_functions():
                if function.qualified_name not in before:
                    _replace_generic_waits(function.graph)


def _replace_generic_waits(graph: Graph) -> None:
    for inner in subgraphs(graph):
        _replace_generic_waits(inner)
    for call in graph.findAllNodes(_CALL):
        name = call.inputsAt(0).type().annotation_str
        if name not in _WAIT_OVERLOADS:
            continue
        value, result = call.inputsAt(1), call.output()
        if name.endswith("value"):
            # Kept as two operators that do nothing, since "wait here" says where.
            value = _insert(graph, _NOWAIT, value, await_type(value.type()), call)
        kind = "aten::wait" if name.endswith("future") else _WAIT
        result.replaceAllUsesWith(_insert(graph, kind, value, result.type(), call))
        function = call.inputsAt(0).node()
        call.destroy()
        # Left there, the function would go into the saved file.
        if not function.hasUses():
            function.destroy()


def _insert(graph: Graph, kind: str, value: Value, result: Type, before: Node) -> Value:
    node = graph.create(kind, [value], 1)
    node.copyMetadata(before)
    node.output().setType(result)
    node.insertBefore(before)
    return node.output()


def subgraphs(graph: Graph) -> Iterator[Graph]:
    """The graphs that the forks and awaitables of a graph will run; not those inside these."""
    for kind in ("prim::awaitable", "prim::fork"):
        for node in graph.findAllNodes(kind):
            yield node.g("Subgraph")


def methods_of(module: torch.jit.ScriptModule) -> Iterator[Any]:
    """The compiled methods of a scripted module and all the modules in it, the outermost first. Each once."""
    seen = set()
    for inner in module.modules():
        compiled: Any = inner._c
        for name in compiled._method_names():
            method = compiled._get_method(name)
            # Modules of one type share their methods.
            key = (compiled._type().qualified_name(), name)
            if key not in seen:
                seen.add(key)
                yield method


# [Note: inlining without leaving a trace]
# To inline a method, TorchScript makes an optimized copy of it, keeps that with the method, and runs it ever after,
# even if the method's graph is changed. It keeps one copy for each of four states of autocast. So we inline in the
# state that is never used, autocast for both CPU and CUDA, and with optimization off, since the copies would get
# autocast's conversions. Such a copy has its own calls in it still, which is why inlining goes round by round.
@contextmanager
def _apart() -> Iterator[None]:
    devices = ("cpu", "cuda")
    autocast = [torch.is_autocast_enabled(device) for device in devices]
    optimize = torch._C._get_graph_executor_optimize()
    try:
        for device in devices:
            torch.set_autocast_enabled(device, True)
        torch._C._set_graph_executor_optimize(False)
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimize)
        for device, enabled in zip(devices, autocast, strict=True):
            torch.set_autocast_enabled(device, enabled)


def inline(graph: Graph) -> None:
    """Puts the bodies of all called functions and methods into a graph, so that values can be followed through them.

    Calls by way of an interface stay.
    """
    with _apart():
        before: set[int] = set()
        while calls := _calls(graph) - before:
            before |= calls
            torch._C._jit_pass_inline(graph)


def _calls(graph: Graph) -> set[int]:
    return {node.output().unique() for kind in (_CALL, "prim::CallMethod") for node in graph.findAllNodes(kind)}


def inlined(graph: Graph) -> Graph:
    """A copy of a graph with all calls inlined."""
    copy = graph.copy()
    inline(copy)
    return copy


def constant_int(value: Value) -> int | None:
    """The int that a value is known to be, or None."""
    if value.node().kind() != "prim::Constant":
        return None
    constant = value.toIValue()
    return constant if isinstance(constant, int) else None


def writes_or_aliases(node: Node, index: int) -> bool:
    """Whether an operator may change its argument, or keep or return a part of it. True where that is not known.

    ``Node.schema()`` is text, "(no schema)" for nodes that are not operators.
    """
    text = node.schema()
    if text == "(no schema)" or "..." in text:
        return True
    arguments = torch._C.parse_schema(text).arguments
    return index >= len(arguments) or arguments[index].alias_info is not None


def counts_of(numbers: Tensor, total: int | None = None) -> list[int]:
    """The values of (n,) integers, read on the host. TorchScript also compiles it.

    A tracer has symbols for them, and is told what else it could not know: that none is negative, and their sum.
    """
    counts: list[int] = numbers.tolist()
    if not torch.jit.is_scripting():
        for count in counts:
            torch._check(count >= 0)
        if total is not None:
            torch._check(sum(counts) == total)
    return counts


def list_of(kind: Any, values: Iterable[object]) -> Any:
    """A list attribute with its type for TorchScript, because an empty list does not show it."""
    return torch.jit.Attribute(list(values), list[kind])


def dict_of(kind: Any, values: Mapping[str, object]) -> Any:
    """The same of a dict with text as keys."""
    return torch.jit.Attribute(dict(values), dict[str, kind])


def forward_of(lines: Sequence[str], source: str, **names: object) -> FunctionType:
    """The function ``forward`` that some lines define. TorchScript reads a function's source, so that is kept.

    Args:
        lines: each with its line feed.
        source: name of the source in ``linecache.cache``, from which it may be removed.
        names: what the lines use.
    """
    linecache.cache[source] = (sum(map(len, lines)), None, [*lines], source)
    exec(compile("".join(lines), source, "exec"), names)
    forward = names["forward"]
    assert isinstance(forward, FunctionType)
    return forward


def plain(module: nn.Module) -> nn.Module:
    """``module``, in which each value that was marked for TorchScript is the value itself, as Python needs it."""
    for part in module.modules():
        for name, value in list(vars(part).items()):
            if isinstance(value, torch.jit.Attribute):
                setattr(part, name, value.value)
    return module
