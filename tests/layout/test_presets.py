"""Machines by name."""

from __future__ import annotations

import pytest

from shardrec.layout.presets import PRESETS, preset


def test_figures_of_data_sheets_are_in_bytes_and_seconds() -> None:
    h100 = preset("h100")  # 80 GB, 3.35 TB/s, NVLink 900 GB/s both ways, one adapter of 400 Gb/s, 50 MB of L2
    assert (h100.kind, h100.device_memory, h100.cache) == ("cuda", 80 * 2**30, 50 * 2**20)
    assert (h100.memory_bandwidth, h100.host_link, h100.network) == pytest.approx((3.35e12, 450e9, 50e9))


def test_a_link_inside_a_host_is_no_slower_than_the_network() -> None:
    assert all(machine.memory_bandwidth > machine.host_link >= machine.network for machine in PRESETS.values())
