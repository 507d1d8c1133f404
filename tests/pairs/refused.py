"""The combinations that are refused, each with its reason: what docs/ledger.md says, and what the tests see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.pairs.axes import PIPELINES, Combination, Row

__all__ = ["LEFT_OUT", "REFUSED", "Refused", "table"]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A combination of values that an error refuses.

    Args:
        names: of its values, for the page.
        values: by axis, the values; each choice of them is refused.
        stage: of a row in which the error is raised: "shard", "execute", "pipeline", "step", "carrier", "evaluation".
        kind: name of the error's class.
        match: what its message has.
        reason: for the page.
        beside: values of other axes of the row that shows it.
    """

    names: tuple[str, str]
    values: Combination
    stage: str
    match: str
    reason: str
    kind: str = "ConfigError"
    beside: Mapping[str, str]

    def row(self) -> Row:
        """A row that has it, and is as plain as can be beside it."""
        return Row(**{axis: next(iter(values)) for axis, values in self.values.items()} | dict(self.beside))


FUSED = ("fused", "dense in backward")


def refused(
    first: str,
    second: str,
    values: Combination,
    stage: str,
    match: str,
    reason: str,
    *,
    kind: str = "ConfigError",
    **beside: str,
) -> Refused:
    return Refused(
        names=(first, second), values=values, stage=stage, match=match, reason=reason, kind=kind, beside=beside
    )


REFUSED: tuple[Refused, ...] = (
    refused(
        'tables updated in backward (`update="backward"`)',
        "`GradScaler`",
        {"update": ("backward",), "gradients": ("GradScaler",), "optimizer": FUSED},
        "step",
        "a GradScaler is given an optimizer of this model, but its tables are updated in each backward",
        "the backward has updated the tables with the scaled gradients",
    ),
    refused(
        'tables updated in backward (`update="backward"`)',
        "clipping",
        {"update": ("backward",), "gradients": ("clipping",), "optimizer": FUSED},
        "step",
        "finds no gradients to clip in a part of this model: its tables are updated in each backward",
        "the tables' gradients have been applied before there is a norm",
    ),
    refused(
        "dense part in backward",
        "`GradScaler`",
        {"optimizer": ("dense in backward",), "gradients": ("GradScaler",)},
        "step",
        "a GradScaler is given an optimizer of this model, but the optimizers of top",
        "the backward has updated the dense part with the scaled gradients",
        update="step",
    ),
    refused(
        "dense part in backward",
        "clipping",
        {"optimizer": ("dense in backward",), "gradients": ("clipping",)},
        "step",
        "finds no gradients to clip in a part of this model: the optimizers of top",
        "the dense part's gradients have been applied before there is a norm",
        update="step",
    ),
    refused(
        "tables updated in backward",
        "`TrainPipeline(accumulate=)`",
        {"mode": PIPELINES, "update": ("backward",), "optimizer": FUSED, "gradients": ("accumulation",)},
        "pipeline",
        "accumulate is 2, but of this model, its tables are updated in each backward",
        "each backward updates the tables. A loop by hand may call several",
    ),
    refused(
        "dense part in backward",
        "`TrainPipeline(accumulate=)`",
        {"mode": PIPELINES, "optimizer": ("dense in backward",), "gradients": ("accumulation",)},
        "pipeline",
        "accumulate is 2, but of this model, the optimizers of top",
        "each backward updates the dense part. A loop by hand may call several",
        update="step",
    ),
    *(
        refused(
            f"{name}",
            "clipping",
            {"mode": (mode,), "gradients": ("clipping",)},
            "step",
            f"takes no {model}",
            reason,
            update="step",
        )
        for mode, name, model, reason in (
            (
                "replicas",
                "`Replicas`",
                "ReplicatedModel",
                "a row's gradient is another one in each copy until copies are averaged",
            ),
            (
                "elastic",
                "elastic replicas",
                "ElasticModel",
                "a row's gradient is another one in each copy until copies are averaged",
            ),
            (
                "servers",
                "servers",
                "RemoteModel",
                "the gradients of a row are added up on servers, where no trainer sees them",
            ),
        )
    ),
    refused(
        "elastic replicas",
        "`GradScaler`",
        {"mode": ("elastic",), "gradients": ("GradScaler",)},
        "step",
        "its elastic replicas are jobs of their own",
        "jobs of their own would skip different steps",
        update="step",
    ),
    refused(
        "elastic replicas",
        '`dense="fsdp"`',
        {"mode": ("elastic",), "dense": ("fsdp",)},
        "shard",
        "elastic replicas average the dense part's gradients",
        "a replica that dies would take its parts of the dense part with it",
    ),
    refused(
        "elastic replicas",
        "dynamic ids",
        {"mode": ("elastic",), "table": ("dynamic ids",)},
        "shard",
        "dynamic_ids",
        "each job would give ids other rows",
        kind="PlanError",
    ),
    refused(
        "`Replicas`",
        "dynamic ids",
        {"mode": ("replicas",), "table": ("dynamic ids",)},
        "shard",
        "dynamic_ids",
        "each copy would give ids other rows",
        kind="PlanError",
    ),
    refused(
        "servers",
        "dynamic ids",
        {"mode": ("servers",), "table": ("dynamic ids",)},
        "shard",
        "dynamic_ids",
        "servers keep no map from ids to rows",
    ),
    refused(
        "servers",
        "ordinary optimizers of tables",
        {"mode": ("servers",), "optimizer": ("ordinary",)},
        "step",
        "lacks an optimizer that a server could run",
        "a server updates its rows by itself",
    ),
    *(
        refused(name, "deep copy", {"mode": (mode,), "carrier": ("deep copy",)}, "carrier", "cannot be copied", reason)
        for mode, name, reason in (
            ("replicas", "`Replicas`", "the copy would have groups and counts of its own, in no step with the others"),
            ("elastic", "elastic replicas", "the copy would be a replica that has joined no other"),
            ("servers", "servers", "the rows are the servers'"),
        )
    ),
    *(
        refused(
            name,
            "`reshard`",
            {"mode": (mode,), "carrier": ("reshard",)},
            "carrier",
            "cannot be given another plan",
            reason,
        )
        for mode, name, reason in (
            ("replicas", "`Replicas`", "all copies would have to move together: save, shard anew and load"),
            ("elastic", "elastic replicas", "a replica that joins would find another plan than its own"),
            ("servers", "servers", "a server's rows are where its plan has them: save, start others and load"),
        )
    ),
    refused(
        '`dense="fsdp"`',
        "deep copy",
        {"dense": ("fsdp",), "carrier": ("deep copy",)},
        "carrier",
        "cannot be copied",
        "FSDP2 copies no sharded module",
    ),
    refused(
        '`dense="fsdp"`',
        "`reshard`",
        {"dense": ("fsdp",), "carrier": ("reshard",)},
        "carrier",
        "cannot be given another plan",
        "FSDP2 keeps the parameters that it was given",
    ),
    refused(
        '`dense="fsdp"`',
        "dense part in backward",
        {"dense": ("fsdp",), "optimizer": ("dense in backward",)},
        "shard",
        "has given optimizers to top",
        "FSDP2's gradients reach no optimizer in backward",
    ),
    refused(
        '`dense="fsdp"`',
        "live script",
        {"dense": ("fsdp",), "executor": ("live script",)},
        "execute",
        "is sharded by FSDP2",
        "TorchScript runs none of FSDP2's hooks",
        kind="ScriptError",
    ),
    refused(
        "servers",
        "warm start",
        {"mode": ("servers",), "carrier": ("warm start",)},
        "carrier",
        "a model with embedding servers cannot start warm",
        "servers load a checkpoint of the same tables alone",
    ),
    refused(
        "servers",
        "published version",
        {"mode": ("servers",), "carrier": ("published version",)},
        "carrier",
        "with its tables on its ranks",
        "trainers have no rows to compare with those published",
    ),
    refused(
        "one copy of the tables",
        "evaluation on some ranks",
        {"mode": ("plain", "detect_anomaly", "servers", *PIPELINES), "evaluation": ("some ranks",)},
        "evaluation",
        "the ranks disagree about their input",
        "a lookup is an exchange of all ranks that share the tables",
        kind="InputError",
    ),
)
"""At most 30, of which each is refused before anything changes."""


LEFT_OUT: tuple[Combination, ...] = ({"dense": ("fsdp",), "evaluation": ("some ranks",)},)
"""What nobody can refuse: FSDP2 gathers parameters from all ranks in each forward, and one that is alone waits."""


def table() -> str:
    """The page's table."""
    lines = ["| | with | is refused, because |", "|---|---|---|"]
    lines += [f"| {each.names[0]} | {each.names[1]} | {each.reason} |" for each in REFUSED]
    return "\n".join(lines)
