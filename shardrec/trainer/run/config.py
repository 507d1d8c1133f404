"""``TrainConfig``: everything that decides a training run, from defaults, a YAML file and flags, in this order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Discriminator, Tag

from shardrec import ConfigError
from shardrec.files import read_text
from shardrec.trainer.run.option_groups import (
    RESTARTS,
    FeedData,
    FiniteData,
    LearningOptions,
    ModelOptions,
    OutputOptions,
    RankOptions,
    data_kind,
)
from shardrec.trainer.run.options import OptionGroup, Options, flag, named_values, together
from shardrec.trainer.yaml_files import parse_yaml, yaml_lines

if TYPE_CHECKING:
    import yaml

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its results."""

FILE = "config.yaml"
"""The effective options, in a run's results."""

ROWS = "_rows"
"""The folder, inside a run's, of files that are converted to Parquet. Data never have its name."""
SPEC = "features.yaml"
"""The feature spec, in the folder of a run that has one. Vocabularies counted in its data are beside it."""

PLAN = "plan.json"
"""The sharding plan, in a run's folder."""

METRICS = "metrics.json"
"""The results of the run, in its folder."""

BOARD = "tensorboard"
"""The folder of TensorBoard's event files, in a run's folder."""

TOPIC_FILES = "topic"
"""The folder of the files that a run on a topic has the records written to, in the run's folder."""

_OF_REPLICAS = ("constraint", "plan", "replicas", "elastic", "sync_every")
"""Options of ranks that the replicas of a run share."""

_MAY_CHANGE = ("on_bad_row", "feed_idle", "event_every")
"""Options of data that a resumed run may change: none decides which rows are trained on, or in which order."""

_NOT_OF_FEEDS = ("loss", "decay", "schedule", "patience", "monitor", "evaluations", "ranking")
_NOT_ELASTIC = (
    *("replan", "patience", "clip", "ema", "accumulate", "pipeline", "compile", "detect_anomaly"),
    "publish",
)


class TrainConfig(Options):
    """One training run. Each option is a key of the YAML file, in its group or beside the groups, and a flag.

    Raises:
        ConfigError: if an option has an invalid value. Names each one, its value and the valid values.
    """

    data: Annotated[
        Annotated[FiniteData, Tag("not a feed")] | Annotated[FeedData, Tag("a feed")], Discriminator(data_kind)
    ]
    model: ModelOptions
    learning: LearningOptions
    ranks: RankOptions
    output: OutputOptions

    if TYPE_CHECKING:  # options by their keys, beside the groups or in them

        def __init__(self, **options: object) -> None: ...

    def structural_faults(self) -> Iterator[str]:
        """See :class:`Options`."""
        if self.feed is not None:
            yield from self._faults_of_feeds(self.feed)
        if self.ranks.replicas is not None:
            yield from self._faults_of_replicas()
        if self.learning.needs_groups and self.data.features is None:
            yield (
                f"loss (--loss) is {self.learning.loss!r}, which ranks the rows of a group, and no features "
                "(--features) name one: give a file with group: COLUMN, or loss 'bce'"
            )

    def _faults_of_feeds(self, feed: FeedData) -> Iterator[str]:
        yield from self._refused(
            _NOT_OF_FEEDS,
            "and data (--data) a feed, which does not end, and its rows are scored before they are trained on, by bce",
        )
        if self.output.checkpoint == "best":
            yield "checkpoint (--checkpoint) is 'best', and a feed's points are of different rows: give 'last'"
        if self.output.checkpoint_every is None and feed.feed_idle is None:
            yield (
                "data (--data) is a feed, and its run saves its weights at intervals and when it is told to "
                "end: give checkpoint_every (--checkpoint-every), or feed_idle (--feed-idle) for an end"
            )

    def _faults_of_replicas(self) -> Iterator[str]:
        yield from self._refused(_NOT_ELASTIC, "which does not go with replicas that come and go (--elastic)")
        if self.feed is not None:
            yield (
                f"data (--data) is {self.data.files!r}, and replicas (--elastic) would not see its files at the same "
                "step: name files"
            )
        if self.output.checkpoint == "best":
            yield "checkpoint (--checkpoint) is 'best', which each replica would decide: give 'last'"
        if self.output.out is None:
            yield "out (--out) is left out: name the folder that all replicas (--elastic) share"

    def _refused(self, names: Sequence[str], why: str) -> Iterator[str]:
        """A fault for each of these options that has another value than its default."""
        values, options = self.to_mapping(), self.options()
        for name in names:
            value = values[name]
            if value != options[name].default:
                yield f"{name} ({flag(name)}) is {value!r}, {why}: leave it out"

    @property
    def feed(self) -> FeedData | None:
        """The rows that are trained on as they arrive, if the data is a feed."""
        return self.data if isinstance(self.data, FeedData) else None

    @property
    def epochs(self) -> int:
        """Passes over the rows; over a feed's, as they arrive, one."""
        return self.data.epochs if isinstance(self.data, FiniteData) else 1

    @property
    def replica_count(self) -> int:
        """Copies of the tables."""
        return 1 if self.ranks.replicas is None else self.ranks.replicas.count

    @property
    def allowed_restarts(self) -> int:
        """``max_restarts``, or its default."""
        comes_back = self.output.checkpoint_every is not None or self.ranks.replicas is not None
        return RESTARTS * comes_back if self.ranks.max_restarts is None else self.ranks.max_restarts

    def check_resumes(self, started: Mapping[str, object], *, joins: bool = False) -> None:
        """Check that options of data, model and learning are unchanged. The others may differ when a run is resumed.

        So may ``on_bad_row``: a row that is left out moves no other.

        Args:
            started: the options that the run was started with, as :meth:`to_mapping` gives them.
            joins: whether this is a replica of a run that continues in others, which share more options.

        Raises:
            ConfigError: if some differ. Names each one and both values.
        """
        options, groups = self.to_mapping(), self.groups()
        of_the_run = dict.fromkeys(
            name for group in ("data", "model", "learning") for kind in groups[group] for name in kind.options()
        )
        started = {**TrainConfig().to_mapping(), **started}  # by a version that may have had fewer options
        faults = [
            f"{name} ({flag(name)}) is {options[name]!r} and the run in {self.output.out} was started with "
            f"{started[name]!r}: leave it out, or start a new run in another folder (--out)"
            for name in (*of_the_run, *(_OF_REPLICAS if joins else ()))
            if name not in _MAY_CHANGE and options[name] != started[name]
        ]
        if faults:
            raise ConfigError(together(faults))

    def to_yaml(self) -> str:
        """The effective options as a file for :func:`load_config`."""
        import yaml

        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text


def load_config(
    path: str | Path | None = None, flags: Mapping[str, object] | None = None, *, resume: bool = False
) -> TrainConfig:
    """Defaults, overridden by a YAML file, overridden by flags.

    Args:
        path: YAML file of options. None for none.
        flags: options by field name. Those that are None were not given.
        resume: use the options of the run in the folder ``out``, if it exists, as defaults.

    Raises:
        ConfigError: for a file that cannot be read, an option that does not exist, or a value that cannot be honoured.
    """
    read = _read(Path(path)) if path is not None else {}
    values = {name: value for name, (value, _) in read.items()}
    overrides = {name: value for name, value in (flags or {}).items() if value is not None}
    if "model_args" in overrides:  # of the file's arguments each that no flag gives
        try:
            overrides["model_args"] = named_values(values.get("model_args", {})) | named_values(overrides["model_args"])
        except ValueError as error:
            raise ConfigError(f"model_args (--model-arg) is {overrides['model_args']!r}: {error}") from None
    values |= overrides
    started = Path(str(values.get("out")), FILE)
    if resume and "out" in values and started.is_file():
        values = {name: value for name, (value, _) in _read(started).items()} | values
    try:
        return TrainConfig(**values)
    except ConfigError as error:
        text = str(error)
        for name in read.keys() - overrides.keys():
            text = text.replace(f"{name} ({flag(name)})", f"{name} ({path}:{read[name][1]})")
        raise ConfigError(text) from None


def load_config_text(text: str, path: Path) -> TrainConfig:
    """:func:`load_config` of a file that has been read. ``path`` is for messages."""
    return TrainConfig(**{name: value for name, (value, _) in _parse(text, path).items()})


def _read(path: Path) -> dict[str, tuple[object, int]]:
    """The options of a file, and their lines."""
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist: check the name, or leave it out") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error}): give a YAML file of options. A pattern of data files needs "
            "quotes, or the shell makes several arguments of it"
        ) from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> dict[str, tuple[object, int]]:
    loaded, root = parse_yaml(text, f"config file {path}")
    if loaded is None or root is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config file {path} holds a {type(loaded).__name__}: give options, in lines like 'batch_size: 2048'"
        )
    values: dict[str, tuple[object, int]] = {}
    for name, key, value, line in _entries(loaded, root, TrainConfig.groups(), path):
        if name in values:
            raise ConfigError(
                f"config file {path}:{line}: {str(key)!r} is there twice, first in line {values[name][1]}: keep one"
            )
        values[name] = value, line
    return values


def _entries(
    loaded: Mapping[object, object],
    node: yaml.Node,
    groups: Mapping[str, Sequence[type[OptionGroup]]],
    path: Path,
) -> Iterator[tuple[str, object, object, int]]:
    """Each option of a mapping and of the groups in it: its name, its key as written, its value and its line."""
    lines, nodes = yaml_lines(node), {str(key.value): inner for key, inner in node.value}
    for key, value in loaded.items():
        name = str(key).replace("-", "_")
        if name in groups and isinstance(value, dict):
            keys = {option for kind in groups[name] for option in kind.options()}
            for entry in _entries(value, nodes.get(str(key), node), groups[name][0].groups(), path):
                if entry[0] not in keys and entry[0] in TrainConfig.options():
                    raise ConfigError(
                        f"config file {path}:{entry[3]}: {str(entry[1])!r} is not an option of the group {name!r}. "
                        "Move it into its own group, or beside the groups"
                    )
                yield entry
        else:
            yield name, key, value, lines.get(str(key), 1)
