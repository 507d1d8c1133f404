"""What the sharded modules of a model share: options, headers, gradients, the step, a forward's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from shardrec.exchange.collectives import Collectives
from shardrec.exchange.gradients import Gradients
from shardrec.exchange.headers import Headers
from shardrec.exchange.life_cycle import LifeCycle
from shardrec.exchange.wire_format import QuantizedComms
from shardrec.step.step import Step

if TYPE_CHECKING:
    from shardrec.exchange.batch import OnBadId
    from shardrec.ids.options import DynamicIds


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """The options of :func:`shardrec.shard` for a model's exchanges.

    Args:
        comms: formats of the output exchanges.
        output_dtype: of the modules' outputs. Rows are added up, and travel, as float32 or as ``comms`` says.
        on_bad_id: per feature, the policy for ids outside its table, if they are not an error.
        dynamic_ids: per table, by its name in the plan, what is done with its ids, where they are dynamic.
        updates_at_step: tables with an optimizer are updated by its step, not in backward.
    """

    comms: QuantizedComms = field(default_factory=QuantizedComms)
    output_dtype: torch.dtype = torch.float32
    on_bad_id: Mapping[str, OnBadId] = field(default_factory=dict)
    dynamic_ids: Mapping[str, DynamicIds] = field(default_factory=dict)
    updates_at_step: bool = False


@dataclass
class ForwardState:
    """State of the forward that runs.

    Args:
        dense_signature: dtypes of the model's inputs, ids aside.
        refusal: the fault for which tracing was stopped, or "".
    """

    dense_signature: str = ""
    refusal: str = ""


class ModelContext:
    """Shared by the sharded modules of a model.

    Args:
        collectives: of the group that the embeddings are sharded over.
        device: where header and payload live.
        options: of the model.

    Attributes:
        headers: of the exchanges.
        everyone: of the ranks that train together: the ranks of all replicas.
        life_cycle: the points of a step that other parts of the model subscribe to.
        gradients: of the model's ordinary parameters.
        step: of the modules' calls.
        forward_state: of the forward that runs.
        failures_told: number of this rank's own errors so far that the other ranks have been told of, and raise.
        is_alone_on_device: one rank, with tables on a device.
    """

    def __init__(self, collectives: Collectives, device: torch.device, options: ExchangeOptions | None = None) -> None:
        self.collectives = collectives
        self.device = device
        self.options = options or ExchangeOptions()
        self.headers = self.everyone = Headers(collectives, device)
        self.life_cycle = LifeCycle()
        self.gradients = Gradients(collectives.report_failure, self.life_cycle, are_reduced=collectives.world_size == 1)
        self.step = Step(self.headers, self.options.comms, self.life_cycle)
        self.forward_state = ForwardState()
        self.failures_told = 0
        self.is_alone_on_device = device.type == "cuda" and collectives.world_size == 1
