"""Sharded modules in ``torch.fx`` graphs: one node each, as torch's own modules are.

A tracer traces into the forward of every module that it does not know. The work of a sharded module there (checks,
collectives) cannot be part of a graph; so its forward, when it is called with a tracer's values, records the call.
"""

from __future__ import annotations

from typing import Any

import torch.fx
from torch import nn

from shardrec._dynamo import left_alone
from shardrec.errors import ConfigError


@left_alone
def recorded_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.fx.Proxy | None:
    """The value of a module's call in the graph that is being traced. None if no argument is a tracer's.

    Raises:
        ConfigError: if the module is itself what is traced.
    """
    proxy = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, torch.fx.Proxy)), None)
    if proxy is None:
        return None
    tracer: Any = proxy.tracer
    try:
        path = tracer.path_of_module(module)
    except NameError:
        path = ""
    if not path:
        raise ConfigError(
            f"a {type(module).__name__} is one node of a torch.fx graph, and cannot be traced by itself: trace the "
            "module that holds it, or the .module of shardrec.shard's result"
        )
    recorded: torch.fx.Proxy = tracer.create_proxy("call_module", path, args, kwargs)
    return recorded
