"""The C++ operators of this package, if they were compiled when it was installed.

``torch.ops.shardrec`` has then:

``assemble(blocks, pieces, rows, cols)``
    columns put together from blocks, for :mod:`shardrec.exchange.assemble`
``distribute(gradient, blocks, pieces, scales)``
    the transpose of it, in place
``are_sound(lengths, values, limits)``
    whether lengths and ids are valid, for :mod:`shardrec.exchange.check`
``cut_ids(ids, lengths, weights, units, slots, positions)``
    a batch cut by rows, slot by slot, for :mod:`shardrec.exchange.cut`
``map_ids(ids, out, records, buckets, ...)``, ``admit_ids(ids, records, buckets, ...)``, ``index_ids(records, buckets)``
    raw ids mapped to rows, for :mod:`shardrec.ids.id_map`
``look_up(weights, slots, ids, lengths, id_weights, columns, pooled)``
    sums of rows, or rows, of many tables, for :mod:`shardrec.lookup.native_kernel`
``update(weights, states, slots, ids, lengths, id_weights, gradient, pooled, rule, lr, eps)``
    an optimizer's step on the rows that were looked up, for the same
``weight_gradient(weights, slots, ids, lengths, gradient)``
    the gradient of the ids' weights, for the same
``sum_gradient(ids, lengths, weights, gradients, bases, columns, width, pooled, rows)``
    of several backwards, distinct rows, their gradients and the sums of their squares, for
    :mod:`shardrec.lookup.group_shards`
``update_matrix(weight, state, ids, lengths, id_weights, gradients, bases, columns, pooled, rule, lr, eps)``
    an optimizer's step with the gradients of several backwards, for :mod:`shardrec.lookup.row_optimizers`
``update_rows(weight, state, rows, values, mean_squares, scale, rule, lr, eps)``
    the update of some rows, for the same
``text_keys(data, offsets, hexadecimal, spread)``
    64-bit keys of texts, for :mod:`shardrec.trainer.data.encode`

Without them torch's operators and fbgemm's kernels do the same, with equal results and more passes over memory.

An operator runs on the thread that calls it, whatever torch's number of threads. Invalid arguments raise a
``RuntimeError``, and no memory is accessed out of bounds. ``make sanitize`` verifies that.

Two settings of the environment, for comparisons:

``SHARDREC_NATIVE=0``
    do not use any of these operators; with a folder instead of 0, use those that
    ``python setup.py build_ext --build-lib FOLDER`` compiled
``SHARDREC_KERNELS=fbgemm``
    look tables up, and update them in backward, with fbgemm's kernels although ``look_up``, ``update`` and
    ``weight_gradient`` are there. ``own``, and no setting, use these where they can be used: float32 on the CPU, SGD,
    Adagrad and rowwise Adagrad
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path

import torch

from shardrec.errors import ConfigError

__all__ = ["has_kernels", "has_operators", "library_path"]

_NEWEST = "text_keys"  # an operator that libraries built from older sources do not have


def library_path() -> Path | None:
    """The library built for the torch that is installed, here or in the folder that ``SHARDREC_NATIVE`` names, if any.

    Raises:
        ConfigError: if ``SHARDREC_NATIVE`` is a folder and the library is not there.
    """
    version = "".join(letter if letter.isalnum() else "_" for letter in torch.__version__)
    folder = os.environ.get("SHARDREC_NATIVE") or "0"
    place = Path(__file__).parent if folder == "0" else Path(folder, "shardrec", "native")
    pattern = f"ops_for_torch_{version}.*so"
    library = min(place.glob(pattern), default=None)
    if library is None and folder != "0":
        raise ConfigError(
            f"SHARDREC_NATIVE={folder}: there is no {place / pattern}. Build it with `python setup.py build_ext "
            f"--build-lib {folder}`, or set SHARDREC_NATIVE=0 to do without compiled libraries"
        )
    return library


def _warn(text: str) -> None:
    warnings.warn_explicit(text, RuntimeWarning, "shardrec", 0)  # no line of source code is shown


@cache
def has_operators() -> bool:
    """Load the operators, once, and return whether they can be used. ``SHARDREC_NATIVE=0`` disables them.

    Raises:
        ConfigError: if ``SHARDREC_NATIVE`` is a folder without them.
    """
    path = library_path()
    if os.environ.get("SHARDREC_NATIVE") == "0":
        return False
    if path is None:
        _warn(
            f"shardrec was installed without C++ operators for torch {torch.__version__}. Torch's are used instead, "
            "and training on CPUs takes about twice as long: install shardrec from its sources beside torch with "
            "`pip install --no-build-isolation .`, which compiles them (SHARDREC_NATIVE=0 silences this)",
        )
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        _warn(
            f"the C++ operators of shardrec cannot be loaded ({error}). Torch's are used instead, which is slower: "
            "install shardrec again to build them for this machine",
        )
        return False
    if not hasattr(torch.ops.shardrec, _NEWEST):
        _warn(
            f"the C++ operators of shardrec in {path.name} belong to an older version. Torch's are used instead, "
            "which is slower: install shardrec again to rebuild them",
        )
        return False
    return True


def has_kernels() -> bool:
    """Whether tables are looked up and updated by these operators, if they support the table.

    Raises:
        ConfigError: if ``SHARDREC_KERNELS`` is neither ``own`` nor ``fbgemm``.
    """
    chosen = os.environ.get("SHARDREC_KERNELS") or "own"
    if chosen not in ("own", "fbgemm"):
        raise ConfigError(
            f"SHARDREC_KERNELS={chosen!r}: there are 'own' and 'fbgemm' kernels. Leave it unset for 'own'"
        )
    return chosen == "own" and has_operators()
