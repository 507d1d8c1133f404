"""The axes whose pairs are tested, and a covering array over them.

:func:`covering` is greedy, after AETG (Cohen et al., 1997): each row begins with a combination that no row has yet, and
takes, axis by axis, the value that adds most of those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations, product
from random import Random

__all__ = ["AXES", "PIPELINES", "Combination", "Row", "covering", "has"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a model is and what is done with it: a value of each axis. The defaults are the plainest."""

    mode: str = "plain"
    executor: str = "eager"
    optimizer: str = "fused"
    update: str = "backward"
    gradients: str = "nothing"
    table: str = "row-wise"
    collections: str = "bags"
    dense: str = "ddp"
    carrier: str = "checkpoint"
    evaluation: str = "all ranks"

    def __str__(self) -> str:
        return ", ".join(getattr(self, field.name) for field in fields(self))


PIPELINES = ("pipeline 0", "pipeline 1", "pipeline 2")

AXES: dict[str, tuple[str, ...]] = {
    "mode": ("plain", "replicas", "elastic", "servers", "detect_anomaly", *PIPELINES),
    "executor": ("eager", "live script", "traced"),
    "optimizer": ("fused", "ordinary", "dense in backward"),
    "update": ("backward", "step"),
    "gradients": ("nothing", "GradScaler", "clipping", "accumulation"),
    "table": ("table-wise", "row-wise", "column-wise", "replicated", "frozen", "dynamic ids", "16 bit"),
    "collections": ("bags", "sequences", "both", "one twice"),
    "dense": ("ddp", "fsdp"),
    "carrier": (
        "checkpoint",
        "state_dict",
        "assign=True",
        "deep copy",
        "reshard",
        "warm start",
        "published version",
    ),
    "evaluation": ("all ranks", "some ranks", "no_grad", "no_sync", "activation checkpointing"),
}
"""Of each field of :class:`Row`, its values."""

Combination = Mapping[str, Collection[str]]
"""Of some axes, values; a row has it if its value of each of these axes is one of them."""


def has(values: Mapping[str, str], combination: Combination) -> bool:
    """Whether a row, or part of one, has a combination."""
    return all(values.get(axis) in taken for axis, taken in combination.items())


def covering(strength: int, seed: int, forbidden: Sequence[Combination], tries: int = 8) -> list[Row]:
    """Rows that together have each combination of ``strength`` values, and none that is forbidden.

    Args:
        strength: 2 for pairs.
        seed: of the choices; the same rows for the same seed.
        forbidden: combinations that no row may have.
        tries: candidates for each row, of which the one with the most new combinations is taken.
    """
    rng = Random(seed)
    choices = [tuple(zip(axes, values, strict=True)) for axes in combinations(AXES, strength) for values in _all(axes)]
    rng.shuffle(choices)
    choices = [choice for choice in choices if _completed(dict(choice), forbidden)]
    missing, rows = set(choices), list[Row]()
    for first in choices:
        if first not in missing:
            continue
        candidates = [_candidate(dict(first), missing, strength, forbidden, rng) for _ in range(tries)]
        best = max(candidates, key=lambda values: len(missing & _within(values, strength)))
        missing -= _within(best, strength)
        rows.append(Row(**best))
    return rows


def _all(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return product(*(AXES[axis] for axis in axes))


def _within(values: Mapping[str, str], strength: int) -> set[tuple[tuple[str, str], ...]]:
    """The combinations that a row has."""
    return set(combinations([(axis, values[axis]) for axis in AXES], strength))


def _candidate(
    values: dict[str, str],
    missing: set[tuple[tuple[str, str], ...]],
    strength: int,
    forbidden: Sequence[Combination],
    rng: Random,
) -> dict[str, str]:
    """A row that begins with some values."""
    others = [axis for axis in AXES if axis not in values]
    rng.shuffle(others)
    for axis in others:
        beside = [(each, values[each]) for each in AXES if each in values]
        parts = [_around(axis, part) for part in combinations(beside, strength - 1)]
        gains = {
            value: (sum((*before, (axis, value), *after) in missing for before, after in parts), rng.random())
            for value in AXES[axis]
        }
        ordered = sorted(AXES[axis], key=gains.__getitem__, reverse=True)
        values[axis] = next(value for value in ordered if _completed({**values, axis: value}, forbidden))
    return values


def _around(axis: str, part: Sequence[tuple[str, str]]) -> tuple[Sequence[tuple[str, str]], Sequence[tuple[str, str]]]:
    """A combination's values of the axes before another one, and of those after it."""
    place = sum(_ORDER[each] < _ORDER[axis] for each, _ in part)
    return part[:place], part[place:]


_ORDER = {axis: number for number, axis in enumerate(AXES)}


def _completed(values: dict[str, str], forbidden: Sequence[Combination]) -> dict[str, str] | None:
    """A whole row with these values; None if each has something forbidden."""
    if any(has(values, each) for each in forbidden):
        return None
    axis = next((axis for axis in AXES if axis not in values), None)
    if axis is None:
        return values
    for value in AXES[axis]:
        found = _completed({**values, axis: value}, forbidden)
        if found is not None:
            return found
    return None
