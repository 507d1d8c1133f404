"""What is kept back of the libraries' warnings."""

from __future__ import annotations

import logging
import warnings

import pytest

import shardrec  # noqa: F401
from shardrec.launch.quiet import quiet_libraries

TORCHS = "`isinstance(treespec, LeafSpec)` is deprecated, use `isinstance(treespec, TreeSpec) and treespec.is_leaf()`"


def test_warnings_of_libraries_for_each_other_are_kept_back() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for quiet in (True, False):
            with quiet_libraries(quiet=quiet):
                warnings.warn_explicit("theirs", FutureWarning, "x.py", 1, module="torchrec.modules")
                warnings.warn_explicit(TORCHS, FutureWarning, "copyreg.py", 105, module="copyreg")
                warnings.warn_explicit("the user's", FutureWarning, "y.py", 1, module="own_models")
    assert [str(one.message) for one in seen] == ["the user's", "theirs", TORCHS, "the user's"]


def test_torch_s_warning_of_torchrec_s_first_batch_is_kept_back(caplog: pytest.LogCaptureFixture) -> None:
    torchs = logging.getLogger("torch.fx._symbolic_trace")
    torchs.addHandler(caplog.handler)
    try:
        torchs.warning("is_fx_tracing will return true for both fx.symbolic_trace and torch.export.")
        torchs.warning("something else")
    finally:
        torchs.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"something else"}
