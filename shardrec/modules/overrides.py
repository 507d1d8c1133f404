"""Additions of users to TorchRec's modules: methods and hooks, which the sharded modules that replace them lack."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardrec.errors import ConfigError

_READ_BEFORE = {"embedding_bag_configs", "embedding_configs", "is_weighted", "extra_repr"}


def _hooks_of(owner: object) -> dict[str, Any]:
    """The hooks of a module or a parameter, by the attributes that torch keeps them in."""
    names = [*vars(owner), "_backward_hooks", "_post_accumulate_grad_hooks"]  # parameters have these in slots
    return {
        name: hooks
        for name in names
        if "_hook" in name and isinstance(hooks := getattr(owner, name, None), dict) and hooks
    }


def _has_users(hooks: Any) -> bool:
    """Whether a dict of hooks has a hook that is not torch's or TorchRec's own."""
    functions = (getattr(hook, "hook", hook) for hook in (hooks.values() if isinstance(hooks, dict) else ()))
    modules = (getattr(function, "__module__", None) or "" for function in functions)
    return any(not module.startswith(("torch.", "torchrec.")) for module in modules)


def copy_hooks(source: nn.Module, target: nn.Module, memo: dict[int, Any]) -> None:
    """Give ``target``, which is to be the deep copy of ``source``, copies of its hooks."""
    memo[id(source)] = target  # hooks may be bound to its methods
    vars(target).update(copy.deepcopy(_hooks_of(source), memo))


def refuse_overrides(modules: Mapping[str, nn.Module]) -> None:
    """Raise a ConfigError if methods or hooks were added to modules that are to be replaced. It names them by path."""
    for path, part in ((path, part) for path, module in modules.items() for part in module.modules()):
        classes = type(part).__mro__
        base = next(cls for cls in classes if cls.__module__.startswith(("torch.", "torchrec.")))
        names = {name for scope in (part, *classes[: classes.index(base)]) for name in vars(scope)} - _READ_BEFORE
        if not any(parameter.is_meta for parameter in part.parameters()):
            names.discard("reset_parameters")  # has made the values
        names = {name for name in names if name == "__call__" or not name.startswith("__")}
        added = [f"{name}()" for name in sorted(names) if callable(getattr(base, name, None))]
        owners = (part, *part.parameters(recurse=False))
        added += [name for owner in owners for name, hooks in _hooks_of(owner).items() if _has_users(hooks)]
        if added:
            raise ConfigError(
                f"module {path!r} has {', '.join(added)} of its own, in a {type(part).__name__}, which the sharded "
                f"module that replaces this {base.__name__} would not: put them into a module around it"
            )
