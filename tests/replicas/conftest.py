"""The store of elastic replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist


@pytest.fixture
def store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
