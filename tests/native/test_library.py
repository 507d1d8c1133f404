"""Which library is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardrec import native
from shardrec.errors import ConfigError


def test_a_folder_of_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That ``SHARDREC_NATIVE`` names; one without them is an error, not a silent way to do without."""
    monkeypatch.delenv("SHARDREC_NATIVE", raising=False)
    usual = native.library_path()
    monkeypatch.setenv("SHARDREC_NATIVE", str(tmp_path))
    for look in (native.library_path, native.is_loaded.__wrapped__):
        with pytest.raises(ConfigError, match=r"SHARDREC_NATIVE=.*there is no .*build_ext --build-lib"):
            look()
    if usual is None:
        pytest.skip("the C++ operators were not compiled when shardrec was installed (no C++ compiler?)")
    there = tmp_path / "shardrec" / "native" / usual.name
    there.parent.mkdir(parents=True)
    there.symlink_to(usual)
    assert native.library_path() == there
