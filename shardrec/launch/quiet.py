"""Keeping the libraries below from talking into a run, and from spinning. What the user has set stays."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["environment_for_torch", "quiet_libraries"]

_VARIABLES = {
    # The ranks' network warnings, such as that a host has no IPv6 name.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    # OpenMP's threads spin by default while they wait for each other. With a thread that prepares batches beside them,
    # or with other work on the machine, they then wait for the very thread whose core they keep busy: ten times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_LOGGER = "torch.fx._symbolic_trace"  # tells TorchRec at each start that a function it uses has a new name
_THIRD_PARTY = ("fbgemm_gpu", "pyre_extensions", "tensordict", "torch", "torchmetrics", "torchrec")


@contextmanager
def environment_for_torch(*, quiet: bool = True) -> Iterator[None]:
    """Variables for this process, if it has not loaded torch yet, and for those that it starts meanwhile.

    Args:
        quiet: set them at all.
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
    """Without the warnings that torch, TorchRec and fbgemm-gpu have for each other.

    Args:
        quiet: keep them back at all.
    """
    if not quiet:
        yield
        return
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for package in _THIRD_PARTY:
                warnings.filterwarnings("ignore", module=rf"{package}(\.|$)")
            # torch.export's own use of a name of torch, said to be that of a module of Python's.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            yield
    finally:
        logger.setLevel(level)
