"""The C++ operators of this package, where they were compiled when it was installed.

``torch.ops.shardrec`` has then:

``assemble(blocks, pieces, rows, cols)``
    columns put together from blocks, for :mod:`shardrec.exchange.assemble`
``distribute(gradient, blocks, pieces, scales)``
    the transpose of it, in place
``are_sound(lengths, values, limits)``
    whether lengths and ids are valid, for :mod:`shardrec.exchange.check`
``sum_gradient(ids, lengths, weights, gradient, bases, columns, width, pooled, rows)``
    distinct rows, their gradients and the sums of their squares, for :mod:`shardrec.lookup.bank`
``rowwise_adagrad(weight, state, rows, values, mean_squares, lr, eps)``
    the update of some rows, for :mod:`shardrec.lookup.rows`

Without them the same is done by torch's operators, with equal results and more passes over memory.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import torch

__all__ = ["is_loaded", "library_path"]


def library_path() -> Path | None:
    """The library built for the torch that is installed, if there is one."""
    version = "".join(letter if letter.isalnum() else "_" for letter in torch.__version__)
    return next(iter(sorted(Path(__file__).parent.glob(f"ops_for_torch_{version}.*so"))), None)


@cache
def is_loaded() -> bool:
    """Load the operators, once; whether they can be used. ``SHARDREC_NATIVE=0`` leaves them alone."""
    path = library_path()
    if path is None or os.environ.get("SHARDREC_NATIVE") == "0":
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        warnings.warn(
            f"the C++ operators of shardrec cannot be loaded ({error}); torch's are used instead, which is slower: "
            "install shardrec again to build them for this machine",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
