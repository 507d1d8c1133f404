"""What can be done with a run's folder afterwards: evaluate it on other rows, export it, look into it, compare two."""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardrec import ConfigError, DataError
from shardrec.files import read_json
from shardrec.trainer.run.config import CHECKPOINTS, FILE, METRICS, PLAN, SPEC, TrainConfig, load_config
from shardrec.trainer.run.option_groups import FEED

if TYPE_CHECKING:
    import torch

    from shardrec import ShardedModel, ShardingPlan
    from shardrec.serve import ServedModel
    from shardrec.trainer.data import ClickBatch, ClickMetrics, FeatureSpec
    from shardrec.trainer.run.endpoint import Endpoint
    from shardrec.trainer.run.task_metrics import TaskMetrics

Target = Literal["script", "aoti"]
"""What a run can be exported to: a TorchScript file, or AOTInductor's package."""


class RunFolder:
    """The results of ``shardrec train``.

    Args:
        path: the folder.

    Raises:
        ConfigError: if it holds no run.
    """

    def __init__(self, path: Path) -> None:
        if not (path / FILE).is_file():
            raise ConfigError(f"{path} holds no run: it has no {FILE}. Give the folder of results of shardrec train")
        self.path = path
        config = load_config(path / FILE)
        if (path / SPEC).is_file():
            # The run's own copy: the file that it was started with may have changed.
            config = config.changed(features=str(path / SPEC))
        self.config = config.changed(nproc=1, device="cpu", compile="off")

    @property
    def metrics(self) -> dict[str, Any]:
        """``metrics.json``. Empty while the run lacks results."""
        file = self.path / METRICS
        metrics: dict[str, Any] = read_json(file) if file.is_file() else {}
        return metrics

    @property
    def spec(self) -> FeatureSpec:
        """The columns of its data. For generated rows, the columns of Criteo's files."""
        # With torch.
        from shardrec.trainer.data.spec import FIRST_IDS, IDS
        from shardrec.trainer.run.source import spec_of

        spec = spec_of(self.config)
        return spec if self.config.data.features is None or (self.path / IDS).is_file() else spec.with_ids(FIRST_IDS)

    def model(self) -> ShardedModel:
        """The model of :meth:`loaded` on the CPU."""
        return self.loaded()[0]

    def loaded(self, device: torch.device | None = None) -> tuple[ShardedModel, dict[str, int | str]]:
        """The model of the last good checkpoint or, if the run keeps it, of the best, sharded over the ranks of the
        process group, in eval mode; and the checkpoint's step and the SHA-256 of its manifest. Every rank calls it.

        If the run averages its weights (``ema``), it has the averages.

        Raises:
            CheckpointError: if all of them are damaged.
            ConfigError: if it does not exist.
        """
        # With torch.
        from shardrec import Checkpoints, load_checkpoint, shard
        from shardrec.checkpoint import MANIFEST
        from shardrec.trainer.run.average import Average
        from shardrec.trainer.run.model import (
            build_model,
            changed_source,
            dense_optimizer,
            dynamic_tables,
            fuse_optimizer,
        )

        model = build_model(self.config, self.spec.schema_)
        fuse_optimizer(model, self.config)
        dynamic = dynamic_tables(self.spec, model)
        # A program that runs without shardrec looks distinct ids up for plain ids alone.
        ema = self.config.learning.ema
        sharded = shard(
            model, device=device, dynamic_ids=dynamic, dedup=not dynamic, update="step" if ema else "backward"
        )
        optimizer = dense_optimizer(sharded, self.config) if ema else None
        average = Average(sharded, optimizer, ema) if optimizer is not None and ema else None
        checkpoints = Checkpoints(self.path / CHECKPOINTS)
        loaded = checkpoints.load_last(sharded, optimizer)
        if loaded is None:
            raise ConfigError(f"{self.path} lacks a checkpoint: train it with --checkpoint last, or --checkpoint-every")
        changed = changed_source(self.config.model.name, loaded.extra)
        if changed:
            print(f"shardrec: warning: {changed}", file=sys.stderr, flush=True)
        best = loaded.extra["progress"].get("best_step") if self.config.output.checkpoint == "best" else None
        path = loaded.path if best is None else checkpoints.folder / f"step-{best:012}"
        if best is not None:
            load_checkpoint(path, sharded, optimizer)
        if average is not None:
            average.apply()
        sharded.eval()
        digest = hashlib.sha256((path / MANIFEST).read_bytes()).hexdigest()
        return sharded, {"step": loaded.step if best is None else best, "sha256": digest}

    def evaluate(
        self,
        data: str | None = None,
        on_bad_row: str | None = None,
        scored: Callable[[int], None] | None = None,
        *,
        ranking: str | None = None,
    ) -> tuple[ClickMetrics | TaskMetrics, Mapping[str, int]]:
        """Metrics of the model on all rows of some files, or on the run's own held-out rows.

        Args:
            data: files, as the run's. None for the rows that the run's final metrics are of.
            on_bad_row: "error" or "skip". None for the run's own setting.
            scored: is called with each batch's rows.
            ranking: "rows", "catalogue" or "unseen". None for the run's own setting.

        Returns:
            The metrics, and the rows that were left out, by reason.
        """
        import torch

        # With torch, too.
        from shardrec.launch import RankInfo
        from shardrec.trainer.run.catalogue_ranking import evaluator
        from shardrec.trainer.run.source import Source, total_left_out

        cpu = torch.device("cpu")
        config = self.config
        if data is None and config.feed is not None and config.data.test is None:
            raise ConfigError(f"{self.path} was trained on a feed, which lacks held-out rows: give files (--data)")
        if data is not None and data.startswith(FEED):
            raise ConfigError(f"data (--data) is {data!r}, and only shardrec train takes a feed: leave 'feed:' out")
        if data is not None:
            if trained := self._trained_on(data):
                text = f"the run was trained on {trained}, so metrics of new rows are worse"
                remedy = "leave data (--data) out for the run's held-out rows"
                print(f"shardrec: warning: {text}: {remedy}", file=sys.stderr, flush=True)
            # The file's rows alone: what the run was trained on need not be there any more.
            alone = dict.fromkeys(("test", "samples", "holdout_samples", "feed_idle", "late_after", "event_every"))
            config = config.changed(data=data, valid=data, **alone)
        changes = {"on_bad_row": on_bad_row, "ranking": ranking}
        config = config.changed(**{name: value for name, value in changes.items() if value is not None})
        rank_info = RankInfo(rank=0, world_size=1, device=cpu, threads=torch.get_num_threads())
        source = Source(config.changed(global_batch_size=config.learning.batch_size), rank_info, self.spec)
        batches = source.test_batches() if data is None else source.holdout_batches()

        def counted() -> Iterator[ClickBatch]:
            for batch in batches:
                yield batch
                if scored is not None:
                    scored(batch.size)

        metrics = evaluator(config, self.spec, self.model(), cpu)(counted())
        return metrics, total_left_out(source.left_out)

    def _trained_on(self, data: str) -> str | None:
        """The first of some files that is also a training file of the run. None also if those are gone."""
        from shardrec.trainer.data.urls import files_of  # with torch

        try:
            trained = {os.path.realpath(path) for path in files_of(self.config.data.files)}
        except DataError:
            return None
        return next((path for path in files_of(data) if os.path.realpath(path) in trained), None)

    def following(self, source: str) -> ServedModel:
        """The model of the run as it is published. Needs no checkpoint.

        Args:
            source: folder or URL, ``--publish`` of the run.

        Raises:
            ConfigError: if another model is published there.
        """
        # With torch.
        from shardrec import ShardingPlan, shard
        from shardrec.serve import quantize
        from shardrec.trainer.run.model import build_model, dynamic_tables, fuse_optimizer

        model = build_model(self.config, self.spec.schema_)
        dynamic = dynamic_tables(self.spec, model)
        if dynamic:  # their rows are evicted with their optimizer's states only
            fuse_optimizer(model, self.config)
        plan = ShardingPlan.load(self.path / PLAN).on_one_rank() if dynamic else None
        served = quantize(shard(model, plan, dynamic_ids=dynamic), self.config.output.publish_weights)
        served.follow(source)
        return served

    def endpoint(self, follow: str | None = None) -> Endpoint:
        """The model of the last good checkpoint behind HTTP, or the one that is published at ``follow``."""
        # With torch.
        from shardrec.trainer.data.example import values_of_file
        from shardrec.trainer.run.endpoint import Endpoint

        model, spec = self.model() if follow is None else self.following(follow), self.spec
        about, example = {"run": str(self.path), **self.summary()}, values_of_file(self.config.data.files, spec)
        return Endpoint(model, spec, about, loss=self.config.learning.loss, example=example)

    def export(self, target: Target, out: Path, weights: str = "fp32") -> Path:
        """Write the model for serving, with its tables in inference kernels. See :mod:`shardrec.serve`.

        Args:
            target: what to write.
            out: the file.
            weights: format of the tables: fp32, fp16, int8 or int4.
        """
        import torch
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        from shardrec import serve  # with torch, too

        if not out.parent.is_dir():
            raise ConfigError(f"{out} cannot be written, because {out.parent} is not a folder: make it first")
        schema = self.spec.schema_
        served = serve.quantize(self.model(), weights)
        keys = list(schema.sparse_names)
        if target == "script":
            return serve.save(served, out, features=keys)
        count = len(keys)
        sample = KeyedJaggedTensor(
            keys=keys,
            values=torch.zeros(count, dtype=torch.int64),
            lengths=torch.ones(count, dtype=torch.int64),
            weights=torch.ones(count) if schema.weighted else None,
        )
        return serve.package(served, out, (torch.zeros(1, len(schema.dense_names)), sample))

    def summary(self) -> dict[str, str]:
        """What the run is and came to: data, model, steps, checkpoints, cuts and metrics."""
        try:
            results = _results(self.metrics)
        except (AttributeError, LookupError, OSError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.path / METRICS} is not what shardrec train writes ({type(error).__name__}: {error}); go on "
                f"with shardrec train --resume --out {self.path}"
            ) from error
        checkpoints = sorted(path.name for path in (self.path / CHECKPOINTS).glob("step-*"))
        summary = {
            "data": self.config.data.files,
            "model": " ".join(
                [self.config.model.name, *(f"{name}={value}" for name, value in self.config.model.args.items())]
            ),
            "checkpoints": ", ".join(checkpoints) or "none",
        }
        if (self.path / PLAN).is_file():
            from shardrec import ShardingPlan  # for runs that have a plan

            summary["plan"] = cuts_of(ShardingPlan.load(self.path / PLAN))
        pending = {"results": f"none yet: continue with shardrec train --resume --out {self.path}"}
        return {**summary, **(results or pending)}


def _results(metrics: Mapping[str, Any]) -> dict[str, str]:
    """What is shown of ``metrics.json``."""
    if not metrics:
        return {}
    training, final = metrics["training"], metrics["final"]
    hidden = {"rows", "groups", "click_rate", "auc_stderr"}
    if metrics["config"]["loss"] != "bce" and "gauc" in final:  # its logits rank only
        hidden |= {"logloss", "normalized_entropy"}
    return {
        "samples trained on": f"{training['samples']:,}",
        "steps": f"{training['steps']:,}",
        "samples_per_second": f"{training['samples_per_second']:,.0f}",
        **{
            name: f"{value:.4f}"
            for name, value in final.items()
            if name.rpartition("/")[2] not in hidden and value is not None
        },
        "rows behind them": f"{final['rows']:,}",
    }


def cuts_of(plan: ShardingPlan) -> str:
    """How many ranks a plan is for, and how many tables have which cut."""
    cuts = Counter(table.cut for table in plan.tables)
    return f"{plan.world_size} ranks: " + ", ".join(f"{count} {cut}" for cut, count in sorted(cuts.items()))


def differing(left: TrainConfig, right: TrainConfig) -> Mapping[str, tuple[object, object]]:
    """The options that two runs differ in, except their folders. For feature specs, the contents count."""
    first, second = left.to_mapping(), right.to_mapping()
    specs = {Path(config.data.features).read_bytes() if config.data.features else b"" for config in (left, right)}
    same = {"out"} | ({"features"} if len(specs) == 1 else set())
    return {name: (first[name], second[name]) for name in first if name not in same and first[name] != second[name]}
