"""``ByteReport``: bytes sent, counted and by the formula, as tables for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness.volume import EXCHANGES, Volume
from shardrec.layout import ShardingPlan

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["ByteReport"]

_MAX_RANKS = 16


@dataclass(frozen=True, kw_only=True)
class ByteReport:
    """What the steps of a workload sent.

    Args:
        config: the options in effect.
        environment: versions and machine.
        plan: where the tables were.
        steps: number of steps.
        calls: all-to-alls of a step, per exchange.
        measured: bytes counted in all the steps.
        formula: bytes of all the steps, by the formula, from the ids that were drawn.
        uniform: bytes expected of one step if each row is as likely as any other.
        mismatches: in words, each step, exchange and pair of ranks where the first two differ.
        all_reduced: bytes of replicated tables' gradients in a step, which the all-reduce sends and which are not
            counted here.
    """

    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    plan: ShardingPlan
    steps: int
    calls: Mapping[str, float]
    measured: Volume
    formula: Volume
    uniform: Volume
    mismatches: tuple[str, ...]
    all_reduced: int = 0

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data. Bytes are means over the steps, and ``pairs`` has a row for each rank that sends."""
        return {
            "config": dict(self.config),
            "environment": dict(self.environment),
            "plan": self.plan.to_json(),
            "steps": self.steps,
            "bytes_per_step": {
                name: {
                    "all_to_alls": self.calls.get(name, 0),
                    **{
                        kind: {
                            "sent": volume.sent(exchange=name) / steps,
                            "to_other_hosts": volume.sent(exchange=name, abroad=True) / steps,
                            "pairs": [[count / steps for count in row] for row in volume.pairs[name]],
                        }
                        for kind, volume, steps in self._volumes()
                    },
                }
                for name in EXCHANGES
            },
            "all_reduced_bytes_per_step": self.all_reduced,
            "exact": not self.mismatches,
            "mismatches": list(self.mismatches),
        }

    def by_exchange(self) -> Table:
        """A line for each exchange. Bytes of a step, sent by all the ranks together."""
        from rich.table import Table

        ranks, hosts = self.plan.world_size, self.plan.topology.hosts
        table = Table(
            title=f"Bytes sent in a step by {ranks} rank{'s' * (ranks > 1)} together, mean of {self.steps} steps",
            caption=self._caption(),
            caption_justify="left",
        )
        table.add_column("exchange")
        headings = ["all-to-alls", "measured", "by the formula", "difference", "uniform ids"]
        for heading in [*headings, *(["to other hosts"] if hosts > 1 else [])]:
            table.add_column(heading, justify="right")
        names = [name for name in EXCHANGES if self.calls.get(name) or self.formula.sent(exchange=name)]
        for name in [*names, None]:
            measured, formula = self.measured.sent(exchange=name), self.formula.sent(exchange=name)
            calls = sum(self.calls.values()) if name is None else self.calls.get(name, 0)
            cells = [f"{calls:g}", *self._cells(measured, formula), f"{self.uniform.sent(exchange=name):,.0f}"]
            if hosts > 1:
                cells.append(f"{self.measured.sent(exchange=name, abroad=True) / self.steps:,.0f}")
            if name is None:
                table.add_section()
            table.add_row(name or "all", *cells)
        return table

    def by_rank(self) -> Table:
        """A line for each rank, of many ranks for those that send the most."""
        from rich.table import Table

        hosts = self.plan.topology.hosts
        ranks = sorted(range(self.plan.world_size), key=lambda rank: (-self.measured.sent(rank=rank), rank))
        shown = sorted(ranks[:_MAX_RANKS])
        left = len(ranks) - len(shown)
        table = Table(
            title="Bytes sent in a step by each rank",
            caption=f"and {left} ranks that send no more" if left else None,
        )
        headings = ["rank", "measured", "by the formula", "difference"]
        for heading in [*headings, *(["to other hosts"] if hosts > 1 else [])]:
            table.add_column(heading, justify="right")
        for rank in shown:
            cells = self._cells(self.measured.sent(rank=rank), self.formula.sent(rank=rank))
            if hosts > 1:
                cells.append(f"{self.measured.sent(rank=rank, abroad=True) / self.steps:,.0f}")
            table.add_row(str(rank), *cells)
        return table

    def _volumes(self) -> list[tuple[str, Volume, int]]:
        return [
            ("measured", self.measured, self.steps),
            ("formula", self.formula, self.steps),
            ("uniform", self.uniform, 1),
        ]

    def _cells(self, measured: float, formula: float) -> list[str]:
        return [
            f"{measured / self.steps:,.0f}",
            f"{formula / self.steps:,.0f}",
            f"{(measured - formula) / self.steps:+,.0f}" if measured != formula else "0",
        ]

    def _caption(self) -> str:
        if self.mismatches:
            more = f"\nand {len(self.mismatches) - 3} more" if len(self.mismatches) > 3 else ""
            lines = ["measured bytes are NOT those of the formula:", *self.mismatches[:3]]
            words = "\n".join(lines) + more
        else:
            words = "equal to the byte for each step, exchange and pair of ranks"
        if self.all_reduced and self.plan.world_size > 1:
            ring = 2 * (self.plan.world_size - 1) * self.all_reduced
            words += (
                f"\nnot counted: the all-reduce of {self.all_reduced:,} bytes of replicated tables' gradients (as a "
                f"ring, {ring:,} bytes by all ranks together)"
            )
        return words
