"""The exchange of one rank with itself: whether a device and its process group carry what a step sends."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.exchange.collectives import FunctionalCollectives
from shardrec.exchange.headers import Headers

__all__ = ["check_exchange"]


def check_exchange(group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Send a header, a payload (1,000 int32) and pooled rows (1,000 float32) of the only rank of a group to itself.

    Args:
        group: of one rank.
        device: of the tensors.

    Returns:
        Those of ``"header"``, ``"payload"`` and ``"output"`` that came back other than sent.
    """
    collectives = FunctionalCollectives(group)
    headers = Headers(collectives, device)
    headers.columns += 5
    header = torch.arange(headers.columns, device=device).unsqueeze(0)
    faults = [] if torch.equal(headers.exchange(header), header) else ["header"]
    sent: list[tuple[str, Tensor]] = [("payload", torch.arange(1000, dtype=torch.int32, device=device))]
    sent += [("output", torch.rand(1000, device=device))]
    for what, values in sent:
        (received,) = collectives.send([[values[:300], values[300:]]], [values.numel()], what).wait()
        faults += [] if torch.equal(received, values) else [what]
    return faults
