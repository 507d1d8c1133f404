"""``TrainConfig``: everything that decides a training run, from defaults, a YAML file and flags, in this order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from shardrec import ConfigError
from shardrec.files import read_text
from shardrec.trainer.models import MODELS
from shardrec.trainer.run.constraints import parse_constraint
from shardrec.trainer.run.options import Options, flag, named_values, option, shown_as, together
from shardrec.trainer.yaml_files import parse_yaml, yaml_lines

__all__ = [
    "BOARD",
    "CHECKPOINTS",
    "FEED",
    "FILE",
    "METRICS",
    "PLAN",
    "SPEC",
    "SYNTHETIC",
    "TrainConfig",
    "load_config",
    "load_config_text",
]

SYNTHETIC = "synthetic"
"""The value of ``data`` that asks for generated rows."""

FEED = "feed:"
"""What ``data`` begins with if its rows go on arriving."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its results."""

FILE = "config.yaml"
"""The effective options, in a run's results."""

SPEC = "features.yaml"
"""The feature spec, in the folder of a run that has one; vocabularies counted in its data are beside it."""

PLAN = "plan.json"
"""The sharding plan, in a run's folder."""

METRICS = "metrics.json"
"""The results of the run, in its folder."""

BOARD = "tensorboard"
"""The folder of TensorBoard's event files, in a run's folder."""

_RESTARTS = 3

_DATA, _MODEL, _LEARNING, _RANKS, _OUTPUT = "Data", "Model", "Learning", "Ranks", "Output"
_OF_THE_RUN = (_DATA, _MODEL, _LEARNING)
_OF_REPLICAS = ("constraint", "plan", "replicas", "elastic", "sync_every")

_NOT_OF_FEEDS = (
    *("valid", "samples", "epochs", "holdout", "loss", "decay", "schedule"),
    *("patience", "monitor", "evaluations", "ranking"),
)
_NOT_ELASTIC = (
    *("replan", "patience", "clip", "ema", "accumulate", "pipeline", "compile", "detect_anomaly"),
    "publish",
)
_OVER_GROUPS = ("softmax", "pairwise")
_OWN_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_EVERY = re.compile(r"0*[1-9][0-9]*|(?=.*[1-9])[0-9]+(\.[0-9]+)?m|point")


class TrainConfig(Options):
    """One training run. Each field is a key of the YAML file and, with dashes, a flag; its text is that flag's help.

    Raises:
        ConfigError: if an option has an invalid value; names each one, its value and the valid values.
    """

    data: str = option(
        SYNTHETIC,
        _DATA,
        "Files of rows: a name, a pattern such as 'day_*.parquet', a folder or a URL (.parquet, .csv, .tsv; text also "
        ".gz, .xz, .bz2, .zst); 'feed:' before a folder, a pattern, a manifest or kafka://HOST:PORT/TOPIC, to train on "
        "files or records as they arrive, without an end; or 'synthetic' for generated rows.",
    )
    features: str | None = option(
        None, _DATA, "YAML file that says what the columns are (default: those of Criteo's files)", metavar="YAML"
    )
    valid: str | None = option(None, _DATA, "Files of held-out rows, in place of a share of --data.", metavar="FILES")
    test: str | None = option(
        None, _DATA, "Files of rows for the final metrics (default: the held-out rows)", metavar="FILES"
    )
    shuffle: int | None = option(
        None,
        _DATA,
        "Rows to put in a random order at a time, after the row groups of all files were (default: the files' order)",
        ge=2,
    )
    streams: int = option(
        64,
        _DATA,
        "Row groups, or files of another format, that are read side by side, spread over the ranks; with 1, rows are "
        "in exactly the files' order and every rank decodes all.",
        ge=1,
    )
    samples: int | None = option(
        None, _DATA, "Rows to train on in an epoch, over all ranks (default: 2.4 million; of a file, all)", ge=1
    )
    epochs: int = option(1, _DATA, "Passes over the training rows.", ge=1)
    holdout: float = option(0.1, _DATA, "Share of a file's rows that is held out for the metrics.", gt=0, lt=1)
    holdout_samples: int | None = option(
        None, _DATA, "Rows to compute the metrics on (default: 100,000; of a file, all held out)", ge=2
    )
    on_bad_row: str = option(
        "error", _DATA, "What a row that cannot be read does: end the run, or be left out.", choices=("error", "skip")
    )
    late_after: float | None = option(
        None, _DATA, "Seconds behind the watermark after which a row of a feed is late (default: none is)", ge=0
    )
    max_embeddings: int = option(
        20_000, _DATA, "Most rows of an embedding table; categories are hashed into them.", ge=2
    )

    model: str = option(
        "dlrm",
        _MODEL,
        f"One of {', '.join(MODELS)} (docs/models.md), or package.module:Model of your own.",
        metavar="NAME|MODULE:NAME",
    )
    model_args: dict[str, Any] = option(
        {},
        _MODEL,
        "Argument of the model, its value in YAML, such as dropout=0.1; can be repeated.",
        metavar="NAME=VALUE",
    )
    embedding_dim: int = option(16, _MODEL, "Columns of every embedding table.", ge=1)
    dense_layers: tuple[PositiveInt, ...] = option(
        (64, 32), _MODEL, "Widths of the dense features' layers, without the last one.", metavar="N,N,..."
    )
    over_layers: tuple[PositiveInt, ...] = option(
        (128, 64), _MODEL, "Widths of the layers over the interaction, without the last one.", metavar="N,N,..."
    )

    batch_size: int = option(2048, _LEARNING, "Rows of a batch on each rank.", ge=1)
    global_batch_size: int | None = option(
        None,
        _LEARNING,
        "Rows of a batch over all ranks, spread evenly, in place of --batch-size; a run that goes on keeps its own.",
        ge=1,
    )
    accumulate: int = option(
        1, _LEARNING, "Batches of a step, which takes the gradient of one batch with the rows of all of them.", ge=1
    )
    loss: str = option(
        "bce",
        _LEARNING,
        "Cross entropy of each row (bce); or of the order of a group's rows: softmax over them, or clicked rows "
        "against others in pairs (pairwise). The features say what a group is. Or the loss method of your own model.",
        choices=("bce", *_OVER_GROUPS, "model"),
    )
    optimizer: str = option(
        "adam", _LEARNING, "Optimizer of the dense layers.", choices=("sgd", "adagrad", "adam", "adamw")
    )
    lr: float = option(5e-3, _LEARNING, "Learning rate of the dense layers.", gt=0)
    embedding_optimizer: str = option(
        "rowwise_adagrad",
        _LEARNING,
        "Optimizer of the tables, fused into their backward.",
        choices=("sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "lamb"),
    )
    embedding_lr: float = option(0.1, _LEARNING, "Learning rate of the tables.", gt=0)
    clip: float | None = option(
        None,
        _LEARNING,
        "Largest norm of a step's gradients, of the dense layers and the tables together; a larger one is scaled down.",
        gt=0,
    )
    weight_decay: float = option(
        0.0, _LEARNING, "L2 penalty of the dense layers: times a weight it is added to its gradient.", ge=0
    )
    embedding_weight_decay: float = option(
        0.0, _LEARNING, "The same of the tables, for the rows that a step looks up.", ge=0
    )
    precision: str = option(
        "fp32", _LEARNING, "What the dense layers compute in, in training; weights stay fp32.", choices=("fp32", "bf16")
    )
    warmup: int = option(0, _LEARNING, "Steps over which both learning rates rise linearly to their values.", ge=0)
    schedule: str = option(
        "linear",
        _LEARNING,
        "How both learning rates decay to 0 over the last --decay of the steps; or not at all (constant).",
        choices=("constant", "linear", "cosine"),
    )
    decay: float = option(
        0.5, _LEARNING, "Last fraction of the steps, over which both learning rates decay to 0.", ge=0, le=1
    )
    ema: float | None = option(
        None, _LEARNING, "Evaluate, export and serve averaged weights; this is the decay of a step.", gt=0, lt=1
    )
    patience: int | None = option(
        None,
        _LEARNING,
        "End after this number of points of the held-out curve that are no better than one before (--monitor).",
        ge=1,
    )
    monitor: str | None = option(
        None,
        _LEARNING,
        "Metric of the held-out rows by which points are compared (default: logloss; a loss over groups: gauc)",
        choices=("auc", "logloss", "ne", "gauc", "ndcg"),
    )
    init_from: str | None = option(
        None,
        _LEARNING,
        "Begin with the weights that the model shares with the last checkpoint of another run, or with this one of it.",
        metavar="RUN|CHECKPOINT",
    )
    rename: tuple[str, ...] = option(
        (),
        _LEARNING,
        "With --init-from: a table, or a layer, that has another name now; can be repeated.",
        metavar="OLD=NEW",
    )
    init_rows: tuple[str, ...] = option(
        (),
        _LEARNING,
        "Begin with the rows of a file (.parquet, .npz, .npy), by id, in a table, named as for --constraint; can be "
        "repeated.",
        metavar="TABLE=FILE",
    )
    seed: int = option(0, _LEARNING, "Seed of the first weights and of generated rows.", ge=0)

    nproc: int = option(1, _RANKS, "Ranks to start on this machine; under torchrun, its ranks are joined.", ge=1)
    threads: int | None = option(None, _RANKS, "Threads of each rank (default: cores / ranks)", ge=1)
    device: str = option("cpu", _RANKS, "Where the model lives.", choices=("cpu", "cuda"))
    compile: str = option(
        "off",
        _RANKS,
        "What torch.compile takes: nothing, the dense part with graph breaks at the tables, or all in one graph.",
        choices=("off", "dense", "full"),
    )
    pipeline: int = option(
        0,
        _RANKS,
        "Batches to work ahead: 0; 1, whose ids are exchanged while a step computes; 2, copied to the device, too.",
        ge=0,
        lt=3,
    )
    detect_anomaly: str = option(
        "off",
        _RANKS,
        "Look for NaN and Inf in the rows of tables and their gradients, at every step; slows training down.",
        choices=("off", "on"),
    )
    constraint: tuple[str, ...] = option(
        (),
        _RANKS,
        "Cuts that the planner may use, such as 't_*=row_wise' or 'cat_3=table_wise@0', by the name of a table or of a "
        "feature that one table alone has; can be repeated.",
        metavar="TABLE=CUT[,CUT][@RANK,RANK]",
    )
    plan: str | None = option(None, _RANKS, "Use this plan.json instead of planning.", metavar="PATH")
    replan: int | None = option(
        None,
        _RANKS,
        "Plan anew every N steps for the ids of the last of them, and move tables between ranks if that pays within N "
        "steps (default: the plan stays)",
        ge=1,
    )
    replicas: int = option(
        1,
        _RANKS,
        "Copies of the tables, each trained by a command of its own on ranks of its own (--elastic), over which the "
        "rows of a batch are spread, too.",
        ge=1,
    )
    elastic: str | None = option(
        None,
        _RANKS,
        "Address of the store in which the replicas find each other; one that dies leaves the others training, and "
        "takes their state when it is started again.",
        metavar="HOST:PORT[/NAME]",
    )
    sync_every: int = option(1, _RANKS, "Steps from one averaging of the replicas' tables to the next.", ge=1)
    timeout: float = option(
        300.0, _RANKS, "Seconds that a rank waits for the others before it takes them for dead.", gt=0
    )
    max_restarts: int | None = option(
        None,
        _RANKS,
        "Times in a row, without a new checkpoint, that ranks of this machine are started again after a death "
        f"(default: {_RESTARTS} with --checkpoint-every or --elastic, else 0)",
        ge=0,
    )

    out: str | None = option(None, _OUTPUT, "Folder for the results (default: runs/<date-time>)", metavar="DIR")
    feed_idle: float | None = option(
        None, _OUTPUT, "Seconds without new rows after which a feed has ended (default: it has no end)", ge=0
    )
    event_every: float | None = option(
        None, _OUTPUT, "Seconds of event time from a point of a feed's curve to the next (default: by rows)", gt=0
    )
    evaluations: int = option(10, _OUTPUT, "Points of the held-out curve.", ge=1)
    top_k: int = option(
        10,
        _OUTPUT,
        "Places at the top of each group that NDCG, recall and hit rate count, of data with groups.",
        ge=1,
    )
    ranking: str = option(
        "rows",
        _OUTPUT,
        "What the item of a clicked held-out row is ranked among: the rows of its group, all items (catalogue), or "
        "those but the row's own, of features that share the item's table (unseen).",
        choices=("rows", "catalogue", "unseen"),
    )
    checkpoint: str = option(
        "last",
        _OUTPUT,
        "Save the model at the end (last), also at the best point, whose weights are then tested (best), or not.",
        choices=("last", "best", "none"),
    )
    checkpoint_every: str | None = option(
        None, _OUTPUT, "Save every N steps, or minutes ('10m'), and when told to end.", metavar="STEPS|MINUTESm|point"
    )
    checkpoint_incremental: int = option(
        0, _OUTPUT, "Most saves in a row that write only rows that have changed; 0: all rows, always.", ge=0
    )
    keep_checkpoints: int = option(2, _OUTPUT, "Newest checkpoints to keep.", ge=1)
    publish: str | None = option(
        None, _OUTPUT, "Publish the model here while it trains, for servers that follow it.", metavar="DIR|URL"
    )
    publish_every: str = option(
        "1m", _OUTPUT, "Publish every N steps, or minutes, and at the end.", metavar="STEPS|MINUTESm|point"
    )
    publish_weights: str = option(
        "fp32", _OUTPUT, "Format of the tables in what is published.", choices=("fp32", "fp16", "int8", "int4")
    )

    def structural_faults(self) -> list[str]:
        """See :class:`Options`."""
        faults = []
        for text in self.constraint:
            try:
                parse_constraint(text)
            except ConfigError as error:
                faults.append(str(error))
        renamed = {pair.partition("=")[0] for pair in self.rename if "=" in pair}
        if self.rename and (self.init_from is None or len(renamed) < len(self.rename)):
            faults.append(
                f"rename (--rename) is {self.rename!r}: give OLD=NEW, each OLD once, with init_from (--init-from)"
            )
        filled = {pair.partition("=")[0] for pair in self.init_rows if pair.partition("=")[2]}
        if len(filled) < len(self.init_rows):
            faults.append(f"init_rows (--init-rows) is {self.init_rows!r}: give TABLE=FILE, each TABLE once")
        if self.plan is not None and self.constraint:
            faults.append("constraint (--constraint) is for the planner and plan (--plan) replaces it: leave one out")
        if self.detect_anomaly == "on" and self.compile == "full":
            faults.append(
                "detect_anomaly (--detect-anomaly) is 'on', which cannot look into one graph of compile (--compile) "
                "'full': give compile 'dense' or 'off'"
            )
        if self.detect_anomaly == "on" and self.replan is not None:
            faults.append(
                f"replan (--replan) is {self.replan!r} and detect_anomaly (--detect-anomaly) is 'on', which watches "
                "the tables of one plan: leave one out"
            )
        if self.model not in MODELS and _OWN_MODEL.fullmatch(self.model) is None:
            faults.append(
                f"model (--model) is {self.model!r}: give one of {', '.join(MODELS)}, or your own as "
                "package.module:Model"
            )
        if self.is_synthetic:
            faults += [
                f"{name} ({flag(name)}) is for files, and data (--data) is {SYNTHETIC!r}: leave it out, or name files"
                for name in ("features", "valid", "test", "shuffle")
                if getattr(self, name) is not None
            ]
        if self.feed is not None:
            faults += [
                f"{name} ({flag(name)}) is {getattr(self, name)!r}, and data (--data) a feed, which has no end, and "
                "whose rows are scored before they are trained on, by bce: leave it out"
                for name in _NOT_OF_FEEDS
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if self.checkpoint == "best":
                faults.append(
                    "checkpoint (--checkpoint) is 'best', and a feed's points are of different rows: give 'last'"
                )
            if self.checkpoint_every is None and self.feed_idle is None:
                faults.append(
                    "data (--data) is a feed, whose run saves what it has learned at intervals and when it is told to "
                    "end: give checkpoint_every (--checkpoint-every), or feed_idle (--feed-idle) for an end"
                )
        if (self.elastic is None) != (self.replicas == 1):
            faults.append(
                f"replicas (--replicas) is {self.replicas} and elastic (--elastic) {self.elastic!r}: give 2 or more "
                "and the address of their store, or neither"
            )
        if self.elastic is not None:
            faults += [
                f"{name} ({flag(name)}) is {getattr(self, name)!r}, which does not go with replicas that come and go "
                "(--elastic): leave it out"
                for name in _NOT_ELASTIC
                if getattr(self, name) != type(self).model_fields[name].default
            ]
            if self.feed is not None:
                faults.append(
                    f"data (--data) is {self.data!r}, whose files replicas (--elastic) would not see at the same step: "
                    "name files"
                )
            if self.checkpoint == "best":
                faults.append("checkpoint (--checkpoint) is 'best', which each replica would decide: give 'last'")
            if self.out is None:
                faults.append("out (--out) is left out: name the folder that all replicas (--elastic) share")
        faults += [
            f"{name} ({flag(name)}) is {value!r}, and data (--data) is no feed: leave it out"
            for name in ("feed_idle", "late_after", "event_every")
            if (value := getattr(self, name)) is not None and self.feed is None
        ]
        if self.out is not None and "://" in self.out:
            faults.append(
                f"out (--out) is {self.out!r}: results and checkpoints go to a folder of a file system that is mounted "
                "here; give one, and copy the results afterwards"
            )
        if self.needs_groups and self.features is None:
            faults.append(
                f"loss (--loss) is {self.loss!r}, which ranks the rows of a group, and no features (--features) name "
                "one: give a file with group: COLUMN, or loss 'bce'"
            )
        if self.model == "dcn" and not self.over_layers:
            faults.append("over_layers (--over-layers) is empty: model dcn needs one layer at least")
        faults += [
            f"{name} ({flag(name)}) is {interval!r}: give steps, such as 500, minutes, such as 10m, above 0, or point"
            for name in ("checkpoint_every", "publish_every")
            if (interval := getattr(self, name)) is not None and _EVERY.fullmatch(interval) is None
        ]
        if self.checkpoint_every is not None and self.checkpoint == "none":
            faults.append(
                "checkpoint_every (--checkpoint-every) saves and checkpoint (--checkpoint) is 'none': leave one out"
            )
        return faults

    @property
    def checkpoint_steps(self) -> int | None:
        """Steps from one checkpoint to the next, if they are counted so; 0 with each point of the curve."""
        return _interval(self.checkpoint_every)[0]

    @property
    def checkpoint_seconds(self) -> float | None:
        """Seconds from one checkpoint to the next, if they are counted so."""
        return _interval(self.checkpoint_every)[1]

    @property
    def publish_interval(self) -> tuple[int | None, float | None]:
        """Steps, or seconds, from one published version to the next; (None, None) if nothing is published."""
        return _interval(self.publish and self.publish_every)

    @property
    def allowed_restarts(self) -> int:
        """``max_restarts``, or its default."""
        comes_back = self.checkpoint_every is not None or self.elastic is not None
        return self.max_restarts if self.max_restarts is not None else _RESTARTS * comes_back

    def check_resumes(self, started: Mapping[str, Any], *, joins: bool = False) -> None:
        """Check that options of data, model and learning are unchanged; the others may differ when a run is resumed.

        So may ``on_bad_row``: a row that is left out moves no other.

        Args:
            started: the options that the run was started with, as :meth:`to_mapping` gives them.
            joins: whether this is a replica of a run that goes on in others, which share more options.

        Raises:
            ConfigError: if some differ; names each one and both values.
        """
        options = self.to_mapping()
        started = {**TrainConfig().to_mapping(), **started}  # by a version that may have had fewer options
        faults = [
            f"{name} ({flag(name)}) is {options[name]!r} and the run in {self.out} was started with "
            f"{started[name]!r}: leave it out, or start a new run in another folder (--out)"
            for name, field in TrainConfig.model_fields.items()
            if ((shown_as(field)["panel"] in _OF_THE_RUN and name != "on_bad_row") or (joins and name in _OF_REPLICAS))
            and options[name] != started[name]
        ]
        if faults:
            raise ConfigError(together(faults))

    @property
    def needs_groups(self) -> bool:
        """Whether the loss is one of the order of the rows in a group."""
        return self.loss in _OVER_GROUPS

    @property
    def is_synthetic(self) -> bool:
        """Whether the rows are generated."""
        return self.data == SYNTHETIC

    @property
    def feed(self) -> str | None:
        """The folder, pattern or topic whose rows are trained on as they arrive, if the data is one."""
        return self.data.removeprefix(FEED) if self.data.startswith(FEED) else None

    def to_yaml(self) -> str:
        """The effective options as a file for :func:`load_config`."""
        import yaml

        text: str = yaml.safe_dump(self.to_mapping(), sort_keys=False)
        return text


def _interval(text: str | None) -> tuple[int | None, float | None]:
    """Steps, or seconds, of an option such as ``500`` or ``10m``; 0 steps with each ``point`` of the curve."""
    if text is None:
        return None, None
    return (None, 60 * float(text[:-1])) if text.endswith("m") else (0 if text == "point" else int(text), None)


def load_config(
    path: str | Path | None = None, flags: Mapping[str, Any] | None = None, *, resume: bool = False
) -> TrainConfig:
    """Defaults, overridden by a YAML file, overridden by flags.

    Args:
        path: YAML file of options; None for none.
        flags: options by field name; those that are None were not given.
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
    """:func:`load_config` of a file that has been read; ``path`` is for messages."""
    return TrainConfig(**{name: value for name, (value, _) in _parse(text, path).items()})


def _read(path: Path) -> dict[str, tuple[Any, int]]:
    """The options of a file, and the line of each."""
    try:
        text = read_text(path)
    except FileNotFoundError as error:
        raise ConfigError(f"config file {path} does not exist: check the name, or leave it out") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config file {path} cannot be read ({error}): give a YAML file of options; a pattern of data files needs "
            "quotes, or the shell makes several arguments of it"
        ) from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> dict[str, tuple[Any, int]]:
    loaded, root = parse_yaml(text, f"config file {path}")
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"config file {path} holds a {type(loaded).__name__}: give options, in lines like 'batch_size: 2048'"
        )
    lines = yaml_lines(root)
    values: dict[str, tuple[Any, int]] = {}
    for key, value in loaded.items():
        name, line = str(key).replace("-", "_"), lines.get(str(key), 1)
        if name in values:
            raise ConfigError(
                f"config file {path}:{line}: {str(key)!r} is there twice, first in line {values[name][1]}: keep one"
            )
        values[name] = value, line
    return values
