"""The command line: ``shardrec train`` and ``shardrec doctor``.

This package imports neither torch nor fbgemm-gpu before a command needs them, so that ``--help`` answers quickly.
"""

from shardrec.trainer.cli.app import app, main

__all__ = ["app", "main"]
