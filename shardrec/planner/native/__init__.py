"""The solver's inner loops in C++, where they were compiled when the package was installed.

They do what the Python beside them does, operation by operation, so that a plan is the same with them and without: no
fused multiply-adds, sums in the same order. A call does not hold the interpreter's lock. ``SHARDREC_NATIVE`` says which
to use, if any, as it does for the operators of :mod:`shardrec.native`; unlike those, they do not need torch.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from functools import cache
from typing import Any

from numpy.typing import NDArray

from shardrec._built import built

__all__ = ["address", "library"]

_VERSION = 4  # that of the functions' arguments, in version.cpp


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None if there are none that can be used."""
    path = built("planner/native", "solve.*so")
    if path is None or os.environ.get("SHARDREC_NATIVE") == "0":
        return None
    try:
        found = ctypes.CDLL(str(path))
        if found.shardrec_solve_version() == _VERSION:
            return found
        reason = "they are those of an older version"
    except (OSError, AttributeError) as error:
        reason = str(error)
    warnings.warn(
        f"the C++ functions of shardrec's planner cannot be used ({reason}); Python does the same, and takes longer: "
        "install shardrec again to build them for this machine",
        RuntimeWarning,
        stacklevel=2,
    )
    return None


def address(array: NDArray[Any]) -> ctypes.c_void_p:
    """Where a contiguous array is, for as long as it is kept.

    Raises:
        ValueError: if it is not contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError(f"an array of shape {array.shape} is not contiguous: pass np.ascontiguousarray(array)")
    return ctypes.c_void_p(array.ctypes.data)
