"""What a sharded module answers when ``torch.jit.script``, and not ``shardrec.script``, is called on it.

[Note: the outermost module]
``torch.jit.script`` asks every module that it meets to prepare itself, and puts the answers of inner modules into the
user's model, in place of the modules that were there. So only the outermost one may answer with a copy; it is the one
that is asked before any other is noted in torch's memo.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from torch import nn

from shardrec.scripting.error import ScriptError
from shardrec.scripting.twins import scriptable_copy

__all__ = ["prepared", "refuse"]

_ASKING_FRAME = 2  # prepared() ← __prepare_scriptable__() ← torch


def prepared(model: nn.Module) -> nn.Module:
    """The copy of a sharded model that TorchScript compiles; called by ``__prepare_scriptable__``.

    Its sharded modules wait for their exchange when they are called. ``shardrec.script`` moves the waits to the first
    uses, and compiles ``shardrec.wait``, which is why it stays the better way in.

    Raises:
        ScriptError: for a model inside of another one.
    """
    memo = sys._getframe(_ASKING_FRAME).f_locals.get("memo")
    if memo != {}:
        refuse(model)
    return scriptable_copy(model)


def refuse(module: nn.Module) -> NoReturn:
    """Raise the error of a sharded module that only ``shardrec.script`` can compile."""
    raise ScriptError(
        f"torch.jit.script cannot compile a {type(module).__name__} inside of another module, or by itself, without "
        "changing the model that holds it: use shardrec.script(model), which compiles a copy"
    )
