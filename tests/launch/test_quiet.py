"""What is kept back of the libraries' warnings."""

from __future__ import annotations

import warnings

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
