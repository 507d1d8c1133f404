"""Environment variables and warning filters that silence other libraries. Variables that the user has set are kept."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLES = {
    # Hides the ranks' network warnings, for example about a host without an IPv6 name.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # OpenMP's threads spin by default while they wait for each other. If a thread that prepares batches, or another
    # program, needs the same core, they wait for a thread while they keep its core busy: steps are ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_THIRD_PARTY = ("fbgemm_gpu", "pyre_extensions", "tensordict", "torch", "torchmetrics", "torchrec")


@contextmanager
def environment_for_torch(*, quiet: bool = True) -> Iterator[None]:
    """Set environment variables for torch in this process, if torch is not loaded yet, and in processes started inside.

    Args:
        quiet: False to set none.
    """
    added = {name: value for name, value in _VARIABLES.items() if quiet and name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


@contextmanager
def quiet_libraries(*, quiet: bool = True) -> Iterator[None]:
    """Suppress the warnings that torch, TorchRec and fbgemm-gpu cause in each other.

    Args:
        quiet: False to suppress none.
    """
    if not quiet:
        yield
        return
    with warnings.catch_warnings():
        for package in _THIRD_PARTY:
            warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
        # Caused by torch.export itself, but attributed to a module of the standard library.
        warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
        yield
