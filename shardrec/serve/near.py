"""``shardrec.serve.share_memory``: a loaded program whose ranks exchange through shared memory where they share a host.

A file names the process group itself (see the note in :mod:`shardrec.portable.group`), and so does an exported
program. In a process that has shardrec, the name in the program can become that of a connection through shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.export import ExportedProgram

from shardrec.errors import ConfigError
from shardrec.exchange.transport import Transport, transport_of

__all__ = ["share_memory"]

M = TypeVar("M", bound=nn.Module)

_OPERATORS = ("_c10d_functional", "_c10d_functional_autograd")
_KEPT = "_shardrec_collectives"


def share_memory(program: M, *, transport: Transport | None = None) -> M:
    """Let a program's ranks exchange as the model's did: through shared memory inside a host.

    Every rank calls this with its own program, once it is loaded. The program keeps the connections. What
    ``torch.jit.save`` writes of it afterwards names the process group again.

    Args:
        program: from ``torch.jit.load``, or ``program.module()`` of an ``ExportedProgram``; is changed in place. One on
            a single rank, or on GPUs, stays as it is.
        transport: as in :func:`shardrec.shard`.

    Returns:
        ``program``.

    Raises:
        ConfigError: for a program of another kind, for one that names a process group that this process has not, or for
            an unknown transport.
    """
    if isinstance(program, ExportedProgram):
        raise ConfigError(
            "an ExportedProgram is data, which may be saved: give share_memory what its module() returns, and call that"
        )
    if not isinstance(program, nn.Module):
        raise ConfigError(
            f"share_memory takes a loaded program, not {type(program).__name__}: give it what torch.jit.load or "
            "ExportedProgram.module() returned"
        )
    # Sorted: all ranks connect in one order.
    places = sorted(_places(program), key=lambda place: place[0])
    kept: dict[str, Any] = dict(getattr(program, _KEPT, {}))
    for name, rename in places:
        if any(name == one.operator_group for one in kept.values()):
            continue
        if name not in kept:
            try:
                group = _resolve_process_group(name)  # type: ignore[arg-type]
            except (RuntimeError, ValueError) as error:
                raise ConfigError(
                    f"the program exchanges over the process group {name!r}, which this process has not: call "
                    "torch.distributed.init_process_group first, or name another group in it"
                ) from error
            kept[name] = transport_of(group, torch.device("cpu"), transport)
        rename(kept[name].operator_group)
    if isinstance(program, torch.fx.GraphModule):
        program.recompile()
    setattr(program, _KEPT, kept)
    return program


def _places(program: nn.Module) -> Iterator[tuple[str, Callable[[str], None]]]:
    """Where a program names a process group, and what puts another name there."""
    for module in program.modules():
        if isinstance(module, torch.fx.GraphModule):
            for call in (node for node in module.graph.nodes if getattr(node.target, "namespace", "") in _OPERATORS):
                for place, value in enumerate(call.args):
                    if isinstance(value, str):
                        yield value, partial(call.update_arg, place)
        elif isinstance(module, torch.jit.ScriptModule) and hasattr(module, "group_name") and module.group_name:
            yield module.group_name, partial(setattr, module, "group_name")
