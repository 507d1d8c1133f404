"""Where the compiled libraries are; apart from their loading, of which the planner's must not import torch."""

from __future__ import annotations

import os
from pathlib import Path

from shardrec.errors import ConfigError

__all__ = ["built"]


def built(package: str, pattern: str) -> Path | None:
    """The library of a package of shardrec, from the folder that ``SHARDREC_NATIVE`` names, or from the package itself.

    Args:
        package: its path in shardrec.
        pattern: of the file's name.

    Raises:
        ConfigError: if ``SHARDREC_NATIVE`` is a folder and the library is not there.
    """
    folder = os.environ.get("SHARDREC_NATIVE") or "0"
    root = Path(__file__).parent if folder == "0" else Path(folder, "shardrec")
    found = next(iter(sorted((root / package).glob(pattern))), None)
    if found is None and folder != "0":
        raise ConfigError(
            f"SHARDREC_NATIVE={folder}: there is no {root / package / pattern}; build it with `python setup.py "
            f"build_ext --build-lib {folder}`, or set SHARDREC_NATIVE=0 to do without compiled libraries"
        )
    return found
