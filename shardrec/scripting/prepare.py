"""The answer of a sharded module to ``torch.jit.script`` (instead of ``shardrec.script``).

[Note: the outermost module]
``torch.jit.script`` asks every module that it meets to prepare itself, and puts the answers of inner modules into the
user's model, instead of the modules that were there. So only the outermost one may answer with a copy. It is the one
that is asked before any other is noted in torch's memo.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import NoReturn

from torch import nn

from shardrec._torchscript import after_script
from shardrec.scripting.error import ScriptError
from shardrec.scripting.script import move_waits
from shardrec.scripting.twins import scriptable_copy

_ASKING_FRAME = 2  # prepared() ← __prepare_scriptable__() ← torch


def prepared(model: nn.Module) -> nn.Module:
    """The copy of a sharded model that TorchScript compiles. Called by ``__prepare_scriptable__``.

    The program is the same as :func:`shardrec.script`'s, except for ``shardrec.wait``, which only the latter compiles.

    Raises:
        ScriptError: for a model inside of another one.
    """
    memo = sys._getframe(_ASKING_FRAME).f_locals.get("memo")
    if memo != {}:
        refuse(model)
    copy = scriptable_copy(model, portable=not model.training)
    after_script(copy, partial(move_waits, model, portable=not model.training))
    return copy


def refuse(module: nn.Module) -> NoReturn:
    """Raise the error of a sharded module that only ``shardrec.script`` can compile."""
    raise ScriptError(
        f"torch.jit.script cannot compile a {type(module).__name__} inside of another module, or by itself, without "
        "changing the model that holds it: use shardrec.script(model), which compiles a copy"
    )
