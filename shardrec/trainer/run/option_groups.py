"""The groups of a run's options, one for each part of the run, and what cannot go together in a group."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveInt, field_validator

from shardrec import ConfigError
from shardrec.trainer.models import MODELS
from shardrec.trainer.run.options import OptionGroup, flag, option

if TYPE_CHECKING:
    from shardrec import Constraint

SYNTHETIC = "synthetic"
"""The value of ``data`` that asks for generated rows."""

FEED = "feed:"
"""Prefix of ``data`` if its rows keep arriving."""

RESTARTS = 3
"""Restarts in a row without a new checkpoint, where a run comes back from one."""

_OWN_MODEL = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_EVERY = re.compile(r"0*[1-9][0-9]*|(?=.*[1-9])[0-9]+(\.[0-9]+)?m|point")


class DataOptions(OptionGroup):
    """Which rows a run is of, and how they are read."""

    panel = "Data"

    files: str = option(SYNTHETIC, key="data")
    """Files of rows: a name, a pattern such as 'day_*.parquet', a folder or a URL (.parquet, .csv, .tsv, .npz, .libsvm,
    text also compressed). 'feed:' before a folder, a pattern, a manifest or kafka://HOST:PORT/TOPIC trains on rows as
    they arrive, without an end. 'synthetic' generates rows."""
    features: str | None = option(None, metavar="YAML")
    """YAML file that describes the columns (default: those of Criteo's files)"""
    test: str | None = option(None, metavar="FILES")
    """Files of rows for the final metrics (default: the held-out rows)"""
    shuffle: int | None = option(None, ge=2)
    """Rows to shuffle at a time, after the row groups of all files are shuffled (default: the files' order)"""
    streams: int = option(64, ge=1)
    """Row groups that are read side by side, spread over the ranks. With 1, rows are in exactly the files' order and
    every rank decodes all."""
    holdout_samples: int | None = option(None, ge=2)
    """Rows to compute the metrics on (default: 100,000; of a file, all held out)"""
    on_bad_row: Literal["error", "skip"] = "error"
    """End the run at a row that cannot be read, or leave the row out and count it."""
    max_embeddings: int = option(20_000, ge=2)
    """Most rows of an embedding table of generated or Criteo's columns. Categories are hashed into them."""

    def structural_faults(self) -> Iterator[str]:
        """See :class:`OptionGroup`."""
        for name in ("features", "valid", "test", "shuffle") if self.is_synthetic else ():
            if getattr(self, name) is not None:
                why = f"is for files, and data (--data) is {SYNTHETIC!r}"
                yield f"{name} ({flag(name)}) {why}: leave it out, or name files"

    @property
    def is_synthetic(self) -> bool:
        """Whether the rows are generated."""
        return self.files == SYNTHETIC


class FiniteData(DataOptions):
    """Rows of which there is a last one, in files or generated."""

    valid: str | None = option(None, metavar="FILES")
    """Files of held-out rows, instead of a share of --data."""
    samples: int | None = option(None, ge=1)
    """Rows to train on in an epoch, over all ranks (default: 2.4 million; of a file, all)"""
    epochs: int = option(1, ge=1)
    """Passes over the training rows."""
    holdout: float = option(0.1, gt=0, lt=1)
    """Share of a file's rows that is held out for the metrics, spread at random over the rows."""


class FeedData(DataOptions):
    """Rows that keep arriving."""

    late_after: float | None = option(None, ge=0)
    """Seconds behind the watermark after which a row of a feed is late (default: never)"""
    feed_idle: float | None = option(None, ge=0)
    """Seconds without new rows after which a feed ends (default: never)"""
    event_every: float | None = option(None, gt=0)
    """Seconds of event time from a point of a feed's curve to the next (default: by rows)"""

    @property
    def source(self) -> str:
        """The folder, pattern or topic."""
        return self.files.removeprefix(FEED)


def data_kind(options: object) -> str:
    """The tag of the class for some options of data, given or made."""
    data = options.get("data") if isinstance(options, Mapping) else getattr(options, "files", None)
    return "a feed" if str(data).startswith(FEED) else "not a feed"


class ModelOptions(OptionGroup):
    """The model."""

    panel = "Model"

    name: str = option(
        "dlrm",
        key="model",
        help=f"One of {', '.join(MODELS)} (docs/models.md), or package.module:Model of your own.",
        metavar="NAME|MODULE:NAME",
    )
    args: dict[str, object] = option({}, key="model_args", metavar="NAME=VALUE")
    """Argument of the model, with its value in YAML, such as dropout=0.1. Can be repeated."""
    embedding_dim: int = option(16, ge=1)
    """Columns of the embedding tables without a dim in the spec."""
    dense_layers: tuple[PositiveInt, ...] = option((64, 32), metavar="N,N,...")
    """Widths of the dense features' layers, without the last one."""
    over_layers: tuple[PositiveInt, ...] = option((128, 64), metavar="N,N,...")
    """Widths of the layers over the interaction, without the last one."""

    @field_validator("name")
    @classmethod
    def _is_model(cls, model: str) -> str:
        if model not in MODELS and _OWN_MODEL.fullmatch(model) is None:
            raise ValueError(f"give one of {', '.join(MODELS)}, or your own as package.module:Model")
        return model

    def structural_faults(self) -> Iterator[str]:
        """See :class:`OptionGroup`."""
        if self.name == "dcn" and not self.over_layers:
            yield "over_layers (--over-layers) is empty: model dcn needs one layer at least"


class InitialWeights(OptionGroup):
    """A checkpoint that the first weights are of."""

    panel = "Learning"

    init_from: str = option(..., metavar="RUN|CHECKPOINT")
    """Begin with the weights that the model shares with the last checkpoint of another run, or with this checkpoint."""
    rename: tuple[str, ...] = option((), metavar="OLD=NEW")
    """With --init-from: a table or layer that has a new name. Can be repeated."""

    @field_validator("rename")
    @classmethod
    def _are_pairs(cls, rename: tuple[str, ...]) -> tuple[str, ...]:
        if len({pair.partition("=")[0] for pair in rename if "=" in pair}) < len(rename):
            raise ValueError("give OLD=NEW, each OLD once")
        return rename


class LearningOptions(OptionGroup):
    """What a step learns, and the weights that the first one begins with."""

    panel = "Learning"

    batch_size: int = option(2048, ge=1)
    """Rows of a batch on each rank."""
    global_batch_size: int | None = option(None, ge=1)
    """Rows of a batch over all ranks, spread evenly, instead of --batch-size. A resumed run keeps its own."""
    accumulate: int = option(1, ge=1)
    """Batches whose gradients are added up for one step."""
    loss: Literal["bce", "softmax", "pairwise", "model"] = "bce"
    """Cross entropy by row (bce), softmax over the rows of a group, pairs of a clicked row and another of its group
    (pairwise), or the loss method of the model (model)."""
    optimizer: Literal["sgd", "adagrad", "adam", "adamw"] = "adam"
    """Optimizer of the dense layers."""
    lr: float = option(5e-3, gt=0)
    """Learning rate of the dense layers."""
    embedding_optimizer: Literal[
        "sgd", "adagrad", "rowwise_adagrad", "adam", "adamw", "partial_rowwise_adam", "lamb"
    ] = "rowwise_adagrad"
    """Optimizer of the tables, which updates them in backward."""
    embedding_lr: float = option(0.1, gt=0)
    """Learning rate of the tables."""
    clip: float | None = option(None, gt=0)
    """Largest norm of a step's gradients, over the dense layers and the tables. A larger norm is scaled down."""
    weight_decay: float = option(0.0, ge=0)
    """L2 penalty of the dense layers: added to a weight's gradient, times the weight."""
    embedding_weight_decay: float = option(0.0, ge=0)
    """L2 penalty of the tables, for the rows that a step looks up."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Format in which the dense layers compute in training. Weights stay fp32."""
    warmup: int = option(0, ge=0)
    """Steps over which both learning rates rise linearly to their values."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Decay of both learning rates to 0 over the last --decay of the steps. constant: no decay."""
    decay: float = option(0.5, ge=0, le=1)
    """Last fraction of the steps, over which both learning rates decay to 0."""
    ema: float | None = option(None, gt=0, lt=1)
    """Decay per step of averaged weights, which are evaluated, exported and served (default: off)"""
    patience: int | None = option(None, ge=1)
    """End after this number of points of the held-out curve without a better --monitor (default: off)"""
    monitor: Literal["auc", "logloss", "ne", "gauc", "ndcg"] | None = None
    """Metric of the held-out rows that compares points (default: logloss, or gauc for a loss over groups)"""
    initial: InitialWeights | None = None
    init_rows: tuple[str, ...] = option((), metavar="TABLE=FILE")
    """Begin with the rows of a file (.parquet, .npz, .npy) in a table, by id. Can be repeated."""
    seed: int = option(0, ge=0)
    """Seed of the first weights and of generated rows."""

    @field_validator("init_rows")
    @classmethod
    def _are_of_tables(cls, init_rows: tuple[str, ...]) -> tuple[str, ...]:
        if len({pair.partition("=")[0] for pair in init_rows if pair.partition("=")[2]}) < len(init_rows):
            raise ValueError("give TABLE=FILE, each TABLE once")
        return init_rows

    @property
    def needs_groups(self) -> bool:
        """Whether the loss is one of the order of the rows in a group."""
        return self.loss in ("softmax", "pairwise")


class ReplicaOptions(OptionGroup):
    """Copies of the tables that are trained by a command of its own each."""

    panel = "Ranks"

    count: int = option(1, key="replicas", ge=2, validate_default=True)
    """Copies of the tables. Each is trained by a command of its own (--elastic), on a share of every batch."""
    address: str = option(..., key="elastic", metavar="HOST:PORT[/NAME]")
    """Address of the store in which the replicas find each other. If a replica dies, the others continue."""


class RankOptions(OptionGroup):
    """The processes of a run: what they compute with, which tables they have and how they find each other."""

    panel = "Ranks"

    nproc: int = option(1, ge=1)
    """Ranks to start on this machine. Under torchrun, leave it out: its ranks are joined."""
    threads: int | None = option(None, ge=1)
    """Threads per rank (default: cores / ranks)"""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the model."""
    compile: Literal["off", "dense", "full"] = "off"
    """Compile nothing, the dense part (with graph breaks at the tables), or everything in one graph."""
    pipeline: int = option(0, ge=0, lt=3)
    """Batches to work ahead. 1 exchanges the next batch's ids during a step, 2 also copies batches to the device."""
    detect_anomaly: Literal["off", "on"] = "off"
    """Look for NaN and Inf in the rows of tables and their gradients, at every step. This slows training down."""
    constraint: tuple[str, ...] = option((), metavar="TABLE=CUT[,CUT][@RANK,RANK]")
    """Cuts that the planner may use for a table or a feature, such as 't_*=row_wise' or 'cat_3=table_wise@0'. Can be
    repeated."""
    plan: str | None = option(None, metavar="PATH")
    """Use this plan.json instead of planning."""
    replan: int | None = option(None, ge=1)
    """Plan again every N steps for the current ids, and move tables if that pays within N steps (default: off)"""
    replicas: ReplicaOptions | None = None
    sync_every: int = option(1, ge=1)
    """Steps from one averaging of the replicas' tables to the next."""
    timeout: float = option(300.0, gt=0)
    """Seconds after which a rank that does not answer counts as dead."""
    max_restarts: int | None = option(
        None,
        help="Restarts of this machine's ranks in a row without a new checkpoint "
        f"(default: {RESTARTS} with --checkpoint-every or --elastic, else 0)",
        ge=0,
    )

    def structural_faults(self) -> Iterator[str]:
        """See :class:`OptionGroup`."""
        for text in self.constraint:
            try:
                parse_constraint(text)
            except ConfigError as error:
                yield str(error)
        if self.plan is not None and self.constraint:
            yield "constraint (--constraint) is for the planner and plan (--plan) replaces it: leave one out"
        if self.detect_anomaly == "on" and self.replan is not None:
            yield (
                f"replan (--replan) is {self.replan!r} and detect_anomaly (--detect-anomaly) is 'on', which watches "
                "the tables of one plan: leave one out"
            )
        if self.detect_anomaly == "on" and self.compile == "full":
            yield (
                "detect_anomaly (--detect-anomaly) is 'on', which cannot look into one graph of compile (--compile) "
                "'full': give compile 'dense' or 'off'"
            )


class OutputOptions(OptionGroup):
    """What comes of a run: metrics, checkpoints and published versions, and when."""

    panel = "Output"

    out: str | None = option(None, metavar="DIR")
    """Folder for the results (default: runs/<date-time>)"""
    evaluations: int = option(10, ge=1)
    """Points of the held-out curve."""
    top_k: int = option(10, ge=1)
    """Places at the top of a group that count for NDCG, recall and hit rate."""
    ranking: Literal["rows", "catalogue", "unseen"] = "rows"
    """Rank the item of a clicked held-out row among the rows of its group, all items (catalogue), or the items outside
    of the row's history (unseen)."""
    checkpoint: Literal["last", "best", "none"] = "last"
    """Save the model at the end (last), also at the best point, which is then tested (best), or never (none)."""
    checkpoint_every: str | None = option(None, metavar="STEPS|MINUTESm|point")
    """Save every N steps (500), N minutes (10m) or at each point of the curve, and when told to end (default: off)"""
    checkpoint_incremental: int = option(0, ge=0)
    """Most saves in a row that write only changed rows. 0 writes all rows, always."""
    keep_checkpoints: int = option(2, ge=1)
    """Newest checkpoints to keep."""
    publish: str | None = option(None, metavar="DIR|URL")
    """Folder or URL to publish the model to while it trains, for servers that follow it."""
    publish_every: str = option("1m", metavar="STEPS|MINUTESm|point")
    """Publish every N steps (500), N minutes (10m) or at each point of the curve, and at the end."""
    publish_weights: Literal["fp32", "fp16", "int8", "int4"] = "fp32"
    """Format of the published tables."""

    @field_validator("out")
    @classmethod
    def _is_folder(cls, out: str | None) -> str | None:
        if out is not None and "://" in out:
            raise ValueError(
                "results and checkpoints go to a folder of a file system that is mounted here. Give one, and copy the "
                "results afterwards"
            )
        return out

    @field_validator("checkpoint_every", "publish_every")
    @classmethod
    def _is_interval(cls, interval: str | None) -> str | None:
        if interval is not None and _EVERY.fullmatch(interval) is None:
            raise ValueError("give steps, such as 500, minutes, such as 10m, above 0, or point")
        return interval

    def structural_faults(self) -> Iterator[str]:
        """See :class:`OptionGroup`."""
        if self.checkpoint_every is not None and self.checkpoint == "none":
            yield "checkpoint_every (--checkpoint-every) saves and checkpoint (--checkpoint) is 'none': leave one out"

    @property
    def checkpoint_interval(self) -> tuple[int | None, float | None]:
        """Steps, or seconds, from one checkpoint to the next; (None, None) if there is none before the end."""
        return _interval(self.checkpoint_every)

    @property
    def publish_interval(self) -> tuple[int | None, float | None]:
        """Steps, or seconds, from one published version to the next; (None, None) if nothing is published."""
        return _interval(self.publish and self.publish_every)


def _interval(text: str | None) -> tuple[int | None, float | None]:
    """Steps, or seconds, of an option such as ``500`` or ``10m``; 0 steps with each ``point`` of the curve."""
    if text is None:
        return None, None
    return (None, 60 * float(text[:-1])) if text.endswith("m") else (0 if text == "point" else int(text), None)


def parse_constraint(text: str) -> tuple[str, Constraint]:
    """``'t_*=row_wise,column_wise@0,1'`` as (pattern of plan names, what it asks for). ``@`` is before ranks.

    Raises:
        ConfigError: for another form, an unknown cut, or ranks of a table that every rank has.
    """
    # Imported here because the planner's package is only wanted by runs with a constraint.
    from shardrec import Constraint

    pattern, equals, right = text.rpartition("=")
    cuts_text, _, ranks_text = right.partition("@")
    cuts = tuple(cut.strip().replace("-", "_") for cut in cuts_text.split(",") if cut.strip())
    ranks = [rank.strip() for rank in ranks_text.split(",") if rank.strip()]
    if not equals or not pattern or not (cuts or ranks) or not all(rank.isdecimal() for rank in ranks):
        raise ConfigError(
            f"constraint (--constraint) is {text!r}: give TABLE=CUT[,CUT][@RANK,RANK], such as 't_*=row_wise'"
        )
    try:
        return pattern, Constraint(cuts=cuts, ranks=tuple(map(int, ranks)))
    except ConfigError as error:
        raise ConfigError(f"constraint (--constraint) is {text!r}: {error}") from None
