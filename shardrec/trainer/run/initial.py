"""``start_from``: a new run begins with the weights that it shares with another, or with rows of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardrec import Checkpoints, ConfigError, ShardedModel, warm_start
from shardrec.checkpoint import WarmStart
from shardrec.launch import RankInfo, same_everywhere
from shardrec.layout import table_configs
from shardrec.trainer.data import Feature, FeatureSpec
from shardrec.trainer.data.encode import row_numbers
from shardrec.trainer.run.config import CHECKPOINTS, TrainConfig
from shardrec.trainer.run.model import build_model
from shardrec.trainer.run.runs import RunFolder


def start_from(config: TrainConfig, spec: FeatureSpec, model: ShardedModel, rank_info: RankInfo) -> WarmStart:
    """Load what the model shares with the last checkpoint of a run, or with a given one, and rows of files.

    Every rank calls it.

    Raises:
        ConfigError: on every rank, if it does not exist, or the rows of a table are of other ids there; as
            :func:`shardrec.warm_start`.
        CheckpointError: on every rank, if it is damaged.
    """
    after = _features(config, spec)
    rows = dict(_row_files(config, after))

    def number(table: str, ids: Any) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return row_numbers(ids, after[table][0], spec)

    initial = config.learning.initial
    if initial is None:
        return warm_start(None, model, rows=rows, number=number)
    init_from = Path(initial.init_from)
    run = RunFolder(init_from.parents[1] if init_from.parent.name == CHECKPOINTS else init_from)
    saved = [init_from] if run.path != init_from else [*Checkpoints(run.path / CHECKPOINTS).paths().values()]
    path = same_everywhere(str(max(saved, default="")), rank_info)
    if not path:
        raise ConfigError(
            f"init_from (--init-from) is {initial.init_from!r}, a run without a checkpoint: train it first"
        )
    before = _features(run.config, run.spec)

    def accept(tables: Mapping[str, str]) -> None:
        pairs = [pair for new, old in tables.items() for pair in _pairs(before.get(old, ()), after.get(new, ()))]
        faults = [*_other_ids(pairs), *_other_places(pairs, run.spec, spec), *_other_values(pairs, run.spec, spec)]
        if faults:
            raise ConfigError(f"init_from (--init-from) is {initial.init_from!r}: " + "; ".join(faults[:5]))

    rename = dict(pair.split("=", 1) for pair in initial.rename)
    return warm_start(path, model, rows=rows, rename=rename, resize=("grow", "truncate"), accept=accept, number=number)


def _row_files(config: TrainConfig, tables: Mapping[str, Sequence[Feature]]) -> Iterator[tuple[str, str]]:
    """Each table that begins with rows of a file, by its name in a plan, and the file."""
    for pair in config.learning.init_rows:
        name, _, path = pair.partition("=")
        named = [table for table in tables if name in (table, table.rpartition(".")[2]) and tables[table]]
        named = named or [table for table, features in tables.items() if name in [each.name for each in features]]
        if len(named) != 1:
            raise ConfigError(
                f"init_rows (--init-rows) is {pair!r}, and {name!r} is the name of {len(named)} tables: give one of "
                f"{', '.join(tables)}, or of a feature that one table alone has"
            )
        yield named[0], path


def _features(config: TrainConfig, spec: FeatureSpec) -> dict[str, list[Feature]]:
    """The features that are looked up in each table, by the table's name in a plan."""
    by_name = {feature.name: feature for feature in spec.sparse}
    tables = table_configs(build_model(config, spec.schema_))
    return {name: [by_name[key] for key in table.feature_names if key in by_name] for name, table in tables.items()}


def _pairs(before: Sequence[Feature], after: Sequence[Feature]) -> Iterator[tuple[Feature, Feature]]:
    """A feature of a table with the feature of its former table: the feature that owns the table, and others by their
    names."""
    old = {feature.share and feature.name: feature for feature in before}
    for feature in after:
        if (key := feature.share and feature.name) in old:
            yield old[key], feature


def _other_ids(pairs: list[tuple[Feature, Feature]]) -> Iterator[str]:
    """What would give a row of a table to another id."""
    for old, new in pairs:
        if new.share is not None:  # the same as for the feature that owns the table
            continue
        common = min(len(old.values), len(new.values))
        was, rule = (
            {
                "dynamic_ids": feature.dynamic_ids is not None,
                "ids": feature.coding,
                "rows": None if feature.dynamic_ids or feature.coding == "number" else feature.rows,
                "boundaries": feature.boundaries,
                "vocabulary": feature.values[:common],
            }
            for feature in (old, new)
        )
        for name in [name for name in rule if rule[name] != was[name]][:1]:
            yield (
                f"feature {new.name!r} has {name}: {rule[name]!r:.60}, and {old.name!r} of that run {was[name]!r:.60}, "
                "so that rows are of other ids. Give that (new values at a vocabulary's end), or another name to the "
                "feature, which is then new"
            )


def _other_places(pairs: list[tuple[Feature, Feature]], before: FeatureSpec, after: FeatureSpec) -> Iterator[str]:
    """Features that a dense layer would take for one another: of as many as before, each has to be in its place.

    So has a label that was there before, for layers go by its number.
    """
    dense = {feature.name: feature for feature in before.dense}
    names = {new.name: old.name for old, new in pairs}, {name: name for name in dense}
    for were, are, old_of in zip((before.sparse, before.dense), (after.sparse, after.dense), names, strict=True):
        place_of = {feature.name: place for place, feature in enumerate(were)}
        kept = {place_of[old_of[feature.name]]: feature.name for feature in are if feature.name in old_of}
        wanted = [kept[place] for place in sorted(kept)]
        if len(were) == len(are):
            new = iter(feature.name for feature in are if feature.name not in old_of)
            wanted = [kept.get(place) or next(new) for place in range(len(were))]
        if wanted != [feature.name for feature in are if feature.name in wanted]:
            yield f"the features are in another order, which dense layers depend on. Give it as {', '.join(wanted)}"
    old_places = {task.name: place for place, task in enumerate(before.labels)}
    for place, task in enumerate(after.labels):
        if old_places.get(task.name, place) != place:
            yield (
                f"label {task.name!r} is number {place + 1} of the labels, and was number {old_places[task.name] + 1}: "
                "it would take another one's layers. Give it that place, or another name"
            )


def _other_values(pairs: list[tuple[Feature, Feature]], before: FeatureSpec, after: FeatureSpec) -> Iterator[str]:
    """What would make layers see other numbers for the same row of data.

    Where the values are in the files (column, separator, weights), how many of them are kept (max_length), and rules by
    which ids come to be known (min_count, options of dynamic_ids) may differ: a value keeps its row, and its number.
    """
    dense = {feature.name: feature for feature in before.dense}
    changed = [(old, new, "kind") for old, new in pairs if (old.kind == "weighted") != (new.kind == "weighted")]
    for new in after.dense:
        old = dense.get(new.name, new)
        names = [name for name in ("transform", "mean", "std") if getattr(old, name) != getattr(new, name)]
        changed += [(old, new, name) for name in names]
    for old, new, name in changed:
        yield (
            f"feature {new.name!r} has {name}: {getattr(new, name)}, and {old.name!r} of that run had "
            f"{getattr(old, name)}, so that layers would see other numbers. Give that"
        )
