"""Where Triton can compile nothing, torch's operators take the place of its kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardrec.exchange import launching


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*values: Any) -> None:
        raise RuntimeError("Failed to find C compiler")

    device = torch.device("cuda", 0)
    monkeypatch.setattr(launching, "find_spec", lambda name: name)
    monkeypatch.setattr(launching, "launch", fail)
    monkeypatch.setattr(torch, "empty", lambda *shape, **given: None)
    launching.has_kernels.cache_clear()
    try:
        with pytest.warns(UserWarning, match="kernel here .Failed to find C compiler.*: install a C compiler"):
            assert not launching.has_kernels(device)
        assert not launching.has_kernels(device)  # and without another warning
    finally:
        launching.has_kernels.cache_clear()
