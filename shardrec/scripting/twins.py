"""Makes the copy of a model that TorchScript compiles, with scriptable twins of modules that return pending values.

The model itself is not changed. A copy of its module tree is scripted, with the same parameters, buffers and
attributes in it.

[Note: the wait goes into the twin]
Code that uses ``self.ebc(features)`` as a KeyedTensor compiles only if that is what it returns. So the twin's
``forward`` becomes another method, and the new ``forward`` calls it and waits, in the form that ``defer`` generates.
insert_waits.py then moves the wait out of it and down to the first use. By then TorchScript knows the types of all
values.
"""

from __future__ import annotations

import inspect
import linecache
import types
import typing
import weakref
from collections.abc import Sequence
from itertools import count
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardrec._late_imports import late_import
from shardrec._torchscript import defer, forward_of
from shardrec.pending import Await
from shardrec.scripting.error import ScriptError

ISSUE = "issue"
"""The method of a scripted twin that returns the ``Await``."""

_NUMBERS = count()


@runtime_checkable
class HasScriptedTwin(Protocol):
    """A module for which TorchScript compiles another one, its twin.

    Its ``scripted_twin()`` gives the module to script in its place:

    - one whose ``forward`` is annotated ``-> Await[T]``, where the module itself returns a ``LazyAwaitable[T]``: it
      issues its communication and returns ``shardrec.pending.awaitable(finish, ...)``. Other code sees ``T``, and
      waits for it at its first use;
    - one with any other ``forward``, which replaces the module unchanged.

    The twin takes and returns what the module does, holds the module's own parameters and buffers, and is a new object
    at each call. Its submodules are replaced by their twins in turn. The result can have a twin itself. A module whose
    ``forward`` is such a one already returns itself.
    """

    def scripted_twin(self) -> nn.Module:
        """The module to script instead of this one."""


def scriptable_copy(model: nn.Module, *, portable: bool) -> nn.Module:
    """A copy of ``model`` for ``torch.jit.script``. The generated sources in it live as long as the copy.

    Raises:
        ScriptError: for a twin that breaks the protocol, and for a scripted module in training mode in a portable copy.
    """
    copier = _Copier(portable=portable)
    copy = copier.copy(model, "")
    if copier.infers:
        _freeze(copy)
    # Twins are also kept: their finalizers would free objects that the copy uses.
    weakref.finalize(copy, _forget_sources, copier.sources, copier.alive).atexit = False
    return copy


def _freeze(copy: nn.Module) -> None:
    """Put the modules of a copy in eval mode, with parameters of the same memory that take no gradient.

    Raises:
        ScriptError: if one that is scripted already, which is not copied, is in training mode.
    """
    frozen: dict[int, nn.Parameter | None] = {id(None): None}
    for path, module in copy.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            if module.training:
                raise ScriptError(
                    f"portable programs only infer, and {path}, which is scripted already, is in training mode: call "
                    "eval() on the model before"
                )
            continue
        module.training = False
        parameters = vars(module)["_parameters"]
        for parameter in parameters.values():
            if id(parameter) not in frozen:
                frozen[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        # Not changed in place: the original module has the same dict.
        vars(module)["_parameters"] = {name: frozen[id(parameter)] for name, parameter in parameters.items()}


def _forget_sources(names: Sequence[str], *kept: object) -> None:
    """Drop the source text of generated methods."""
    for name in names:
        linecache.cache.pop(name, None)


class _Copier:
    def __init__(self, *, portable: bool) -> None:
        self._portable = portable
        self.sources: list[str] = []
        self._copies: dict[int, nn.Module] = {}
        # One for each twin's class, so that modules of one class stay modules of one class, which TorchScript compiles
        # once. And fresh ones in each copy: what is compiled is changed afterwards.
        self._waiting_classes: dict[type[nn.Module], type[nn.Module]] = {}
        # Copies are found by the id of their originals, which therefore have to live.
        self.alive: list[nn.Module] = []
        self.infers = False

    def copy(self, module: nn.Module, path: str) -> nn.Module:
        """The module's copy, or its twin's. The same one for the same module."""
        if id(module) not in self._copies:
            twin = self._twin_of(module, path)
            self.alive += [module, twin]
            cls = _scriptable_class(type(twin))
            if _offers_twin(module) and _returns_await(twin, path):
                if cls not in self._waiting_classes:
                    self._waiting_classes[cls] = self._waiting_class(cls, path)
                cls = self._waiting_classes[cls]
            self._copies[id(module)] = self._copy_as(cls, twin, path)
        return self._copies[id(module)]

    def _twin_of(self, module: nn.Module, path: str) -> nn.Module:
        """The module to script instead of another: its twin's twin's twin, or itself."""
        while _offers_twin(module):
            twin: object = module.module if isinstance(module, DistributedDataParallel) else self._ask(module)
            if twin is module:
                break
            if module._forward_hooks or module._forward_pre_hooks:
                raise ScriptError(
                    f"{path or 'the model'} ({type(module).__name__}) has forward hooks, which TorchScript would not "
                    "see, since its twin is scripted: take them off, or register them on a module around it"
                )
            if not isinstance(twin, nn.Module):
                raise ScriptError(
                    f"{type(module).__name__}.scripted_twin() at {path or 'the model'} returned a "
                    f"{type(twin).__name__}: return an nn.Module that TorchScript can compile"
                )
            module = twin
        return module

    def _ask(self, module: nn.Module) -> object:
        if self._portable and getattr(module, "portable", False):
            twin = late_import("portable_twin")(module)
            if twin is not None:
                self.infers = True
                return twin
        assert isinstance(module, HasScriptedTwin)
        return module.scripted_twin()

    def _copy_as(self, cls: type[nn.Module], module: nn.Module, path: str) -> nn.Module:
        if isinstance(module, torch.jit.ScriptModule):
            return module
        copy: nn.Module = object.__new__(cls)  # a GraphModule's own __new__ makes a class without a forward
        # Not through setattr, which nn.Module overrides. Parameters and buffers are the same objects. What TorchScript
        # notes on a module, it notes on the copy.
        vars(copy).update(vars(module))
        vars(copy)["_modules"] = {
            name: None if child is None else self.copy(child, f"{path}.{name}" if path else name)
            for name, child in module._modules.items()
        }
        return copy

    def _waiting_class(self, cls: type[nn.Module], path: str) -> type[nn.Module]:
        """A subclass of a twin's class. Its forward waits for the result of the twin's forward."""
        if hasattr(cls, ISSUE):
            raise ScriptError(
                f"the scripted twin of {path or 'the model'} ({cls.__name__}) has an attribute {ISSUE!r}, which is the "
                "name that its forward gets: call it something else"
            )
        original = _plain_function(cls.forward, cls, path)
        # The same code under another name: TorchScript names a method after the function.
        issue = types.FunctionType(
            original.__code__, original.__globals__, ISSUE, original.__defaults__, original.__closure__
        )
        issue.__kwdefaults__ = original.__kwdefaults__
        issue.__annotations__ = original.__annotations__
        members = {"forward": self._waiting_forward(original, cls), ISSUE: issue, "__module__": cls.__module__}
        return type(cls.__name__, (cls,), {**members, "__doc__": cls.__doc__})

    def _waiting_forward(self, original: types.FunctionType, cls: type[nn.Module]) -> types.FunctionType:
        """A function with the parameters of the twin's forward, made from source text since TorchScript reads that."""
        hints = _hints(original, cls)
        names: dict[str, object] = {"torch": torch}
        written, passed = [], []
        parameters = list(inspect.signature(original).parameters.values())
        for number, parameter in enumerate(parameters[1:]):
            names[f"T{number}"] = hints.get(parameter.name, torch.Tensor)
            text = f"{parameter.name}: T{number}"
            if parameter.default is not parameter.empty:
                names[f"D{number}"] = parameter.default
                text += f" = D{number}"
            if parameter.kind is parameter.KEYWORD_ONLY:
                if "*" not in written:
                    written.append("*")
                passed.append(f"{parameter.name}={parameter.name}")
            else:
                passed.append(parameter.name)
            written.append(text)
        me = parameters[0].name
        call = f"{me}.{ISSUE}({', '.join(passed)})"
        lines = [
            f"def forward({', '.join([me, *written])}):\n",
            f"    return {defer(call)}\n",
        ]
        source = f"<shardrec.script: {cls.__name__} {next(_NUMBERS)}>"
        self.sources.append(source)
        return forward_of(lines, source, **names)


def _scriptable_class(cls: type[nn.Module]) -> type[nn.Module]:
    if cls.__module__ != "torchrec.modules.crossnet":
        return cls
    from shardrec.scripting.crossnets import SCRIPTABLE  # with torchrec, only for models that use them

    return SCRIPTABLE.get(cls, cls)


def _offers_twin(module: nn.Module) -> bool:
    # Asked of the type: some modules pass on the attributes of one that they hold.
    return isinstance(module, DistributedDataParallel) or callable(getattr(type(module), "scripted_twin", None))


def _returns_await(twin: nn.Module, path: str) -> bool:
    """Whether a twin's forward says that it returns an Await. What it says besides is TorchScript's to judge."""
    if isinstance(twin, torch.jit.ScriptModule):
        return False
    said = getattr(type(twin).forward, "__annotations__", {}).get("return")
    if isinstance(said, str) and "Await" in said:
        forward = _plain_function(type(twin).forward, type(twin), path)
        said = _hints(forward, type(twin)).get("return")
    return typing.get_origin(said) is Await


def _plain_function(function: object, cls: type, path: str) -> types.FunctionType:
    if not isinstance(function, types.FunctionType):
        raise ScriptError(
            f"{cls.__name__}.forward, of the scripted twin of {path or 'the model'}, is a {type(function).__name__}: "
            "define it as a plain method with source that TorchScript can read"
        )
    return function


def _hints(function: types.FunctionType, cls: type) -> dict[str, object]:
    try:
        return typing.get_type_hints(function, localns=dict(inspect.getclosurevars(function).nonlocals))
    except NameError as error:
        raise ScriptError(
            f"an annotation of {cls.__name__}.forward, of a scripted twin, cannot be resolved ({error}): import the "
            "name in the twin's module, and not under TYPE_CHECKING"
        ) from error
