"""``start_from``: a new run begins with the weights that it shares with another (``--init-from``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from shardrec.checkpoint import Checkpoints
from shardrec.checkpoint.warm import WarmStart, warm_start
from shardrec.data import Feature, FeatureSpec
from shardrec.errors import ConfigError
from shardrec.launch.ranks import RankInfo, same_everywhere
from shardrec.layout.discover import table_configs
from shardrec.modules import ShardedModel
from shardrec.train.config import CHECKPOINTS, TrainConfig
from shardrec.train.model import build_model
from shardrec.train.runs import RunFolder

__all__ = ["start_from"]


def start_from(config: TrainConfig, spec: FeatureSpec, model: ShardedModel, rank_info: RankInfo) -> WarmStart:
    """Load what the model shares with the last checkpoint of a run, or with a given one. Every rank calls it.

    Raises:
        ConfigError: on every rank, if there is none, or the rows of a table are of other ids there; as
            :func:`shardrec.warm_start`.
        CheckpointError: on every rank, if it is damaged.
    """
    given = Path(str(config.init_from))
    run = RunFolder(given.parents[1] if given.parent.name == CHECKPOINTS else given)
    saved = [given] if run.path != given else [*Checkpoints(run.path / CHECKPOINTS).paths().values()]
    path = same_everywhere(str(max(saved, default="")), rank_info)
    if not path:
        raise ConfigError(
            f"init_from (--init-from) is {config.init_from!r}, a run without a checkpoint: train it first"
        )
    before, after = _features(run.config, run.spec), _features(config, spec)

    def accept(tables: Mapping[str, str]) -> None:
        pairs = [(before[old], after[new]) for new, old in tables.items() if old in before and new in after]
        faults = [*_other_ids(pairs), *_other_places(pairs, run.spec, spec)]
        if faults:
            raise ConfigError(f"init_from (--init-from) is {config.init_from!r}: " + "; ".join(faults[:5]))

    rename = dict(pair.split("=", 1) for pair in config.rename)
    return warm_start(path, model, rename=rename, resize=("grow", "truncate"), accept=accept)


def _features(config: TrainConfig, spec: FeatureSpec) -> dict[str, Feature]:
    """A feature that is looked up in each table, by the table's name in a plan."""
    by_name = {feature.name: feature for feature in spec.sparse}
    tables = table_configs(build_model(config, spec.schema_))
    return {table: by_name[name] for table, one in tables.items() for name in one.feature_names[:1] if name in by_name}


def _other_ids(pairs: list[tuple[Feature, Feature]]) -> Iterator[str]:
    """What would make a row of a table that of another id."""
    for old, new in pairs:
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
                "so that rows are of other ids; give that (new values at a vocabulary's end), or another name to the "
                "feature, which is then new"
            )


def _other_places(pairs: list[tuple[Feature, Feature]], before: FeatureSpec, after: FeatureSpec) -> Iterator[str]:
    """Features that a dense layer would take for one another: of as many as before, each has to be in its place."""
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
            yield f"the features are in another order, which dense layers depend on; give it as {', '.join(wanted)}"
    for feature in after.dense:
        old = dense.get(feature.name, feature)
        if old.transform != feature.transform:
            yield f"feature {feature.name!r} has transform: {feature.transform}, and had {old.transform}; give that"
