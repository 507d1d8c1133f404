"""The device of a rank."""

from __future__ import annotations

import os

import pytest
import torch

from shardrec.errors import ConfigError
from shardrec.launch.ranks import SHARE_DEVICES, joined_run


def test_ranks_share_a_device_if_they_are_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes two ranks for a device if they seem to be on two hosts."""
    chosen: list[int] = []
    for name, found in (("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_HOSTID", "")
    monkeypatch.delenv("NCCL_HOSTID")
    with pytest.raises(ConfigError, match=rf"than CUDA devices on this machine \(1\): .* {SHARE_DEVICES}=1"):
        joined_run("cuda", 1).__enter__()
    monkeypatch.setenv(SHARE_DEVICES, "1")
    with joined_run("cuda", 1) as rank_info:
        assert rank_info.device == torch.device("cuda", 0)
        assert os.environ["NCCL_HOSTID"] == "shardrec-1"
    assert chosen == [0]
