"""A machine's description: what is refused, and what comes back from JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from shardrec.errors import ConfigError
from shardrec.layout.machine import Machine

MACHINE = Machine(name="m", kind="cpu", memory_bandwidth=1e10, host_link=1e9, network=1e9, latency=1e-5)


def test_a_machine_comes_back_from_json() -> None:
    cuda = replace(MACHINE, kind="cuda", device_memory=8e10, host_memory=2.0**36, source="a data sheet")
    for machine in (MACHINE, cuda):
        data = json.loads(json.dumps(machine.to_json()))
        assert Machine.from_json(data) == machine
    assert MACHINE.to_json()["host_memory"] is None and MACHINE.table_memory == inf
    assert cuda.table_memory == 8e10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "tpu"}, r"machine 'm': there is no kind 'tpu'. The kinds are cpu, cuda"),
        ({"network": 0}, r"machine 'm': network is 0. Give bytes per second"),
        ({"memory_link": nan}, r"memory_link is nan. Give bytes per second"),
        ({"latency": -1.0}, r"latency is -1.0. Give a number of at least 0"),
        ({"kind": "cuda"}, r"a CUDA device has memory. Give device_memory in bytes"),
        ({"speed": 1}, r"a machine has no 'speed'. It has name, kind, device_memory,"),
        ({"name": 3}, r"a machine's name is 3. Give a text"),
        ({"name": None}, r"a machine's name is None. Give a text"),
        ({"cache": "2"}, r"a machine's cache is '2'. Give a number"),
        ({"cache": True}, r"a machine's cache is True. Give a number"),
        ({"latency": ...}, r"this is not a machine: .*'latency'"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    data = {name: value for name, value in (MACHINE.to_json() | change).items() if value is not ...}
    with pytest.raises(ConfigError, match=message):
        Machine.from_json(data)
