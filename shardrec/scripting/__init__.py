"""Models in TorchScript.

::

    model ── twins.py ──► copy with twins ── torch.jit.script ──► graphs ── flow.py, insert_waits.py ──► with waits

docs/scripting.md says why it is the graphs that are changed, and not the user's code.
"""

from shardrec.scripting.error import ScriptError
from shardrec.scripting.script import script
from shardrec.scripting.twins import HasScriptedTwin

__all__ = ["HasScriptedTwin", "ScriptError", "script"]
