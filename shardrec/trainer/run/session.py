"""One rank of a run, from its config to its results.

::

    source ─► model on meta ─► plan ─► shard ─► epochs of steps, evaluations and saves ─► final metrics ─► results
              └ fused optimizers      └ dense optimizer, last checkpoint

Every rank goes through all of it. The first one alone shows and writes.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from shardrec import (
    ConfigError,
    Constraint,
    DataError,
    Replicas,
    ShardedModel,
    ShardingPlan,
    annotate_for_dynamo,
    detect_anomaly,
    shard,
)
from shardrec.files import parse_json, read_text
from shardrec.launch import RankInfo, all_gather, joined_run, meet, on_first_rank, over_ranks, same_everywhere
from shardrec.trainer.console import working
from shardrec.trainer.data import ClickBatch, ClickMetrics, FeatureSpec
from shardrec.trainer.data.spec import FIRST_IDS, IDS, VOCABULARIES, parse_spec, read_spec, recorded_ids
from shardrec.trainer.run.average import Average
from shardrec.trainer.run.board import Board
from shardrec.trainer.run.catalogue_ranking import evaluator
from shardrec.trainer.run.config import FILE, METRICS, PLAN, ROWS, SPEC, TrainConfig, load_config_text
from shardrec.trainer.run.display import Announcer, Display
from shardrec.trainer.run.folder import lock_folder, own_folder, replaced
from shardrec.trainer.run.held_out import Progressive, check_monitor
from shardrec.trainer.run.initial import start_from
from shardrec.trainer.run.loop import Schedule, StepPart, failing_together, step_parts, train_epoch
from shardrec.trainer.run.losses import with_own_loss
from shardrec.trainer.run.model import (
    build_model,
    dense_optimizer,
    dynamic_tables,
    export_fault,
    fuse_optimizer,
    planner_constraints,
)
from shardrec.trainer.run.option_groups import FeedData
from shardrec.trainer.run.options import flag, together
from shardrec.trainer.run.prefetch import DealtParts, Prefetcher
from shardrec.trainer.run.progress import Progress, RecentMean
from shardrec.trainer.run.replan import Replanner
from shardrec.trainer.run.report import RunReport, environment, write_curve, write_metrics
from shardrec.trainer.run.run import Run
from shardrec.trainer.run.saving import Saver
from shardrec.trainer.run.source import Source, decided_spec, spec_of, total_left_out
from shardrec.trainer.run.task_metrics import TaskMetrics

_CURVE_ROWS = 100_000
"""Most held-out rows behind a point of the curve. All of the generated ones by default, few of a large file's."""

_POLL_S = 0.5
"""Between two looks for rows of a feed."""

_PROGRESSIVE_ROWS = 100_000
"""Rows of a feed behind a point of the curve."""

_SAMPLED = 4
"""Batches that tell the planner how many ids there are and how they are spread."""


def run_rank(config: TrainConfig, *, resume: bool = False) -> RunReport | None:
    """Train as this process's rank, in the process group that the environment describes or alone.

    Args:
        config: the run. Rank 0's ``out``, which must be set there, holds for all.
        resume: continue from the last checkpoint, if it exists.

    Returns:
        The report, on rank 0. None if a feed had no rows that could be scored.

    Raises:
        ShardrecError: for options, data or peers that the run cannot continue with.
        RunStopped: the run was told to end, and has saved.
    """
    with ExitStack() as lock:
        ranks, learning = config.ranks, config.learning
        alone = ranks.replicas is not None
        with joined_run(
            ranks.device, ranks.threads, seed=learning.seed, timeout=ranks.timeout, alone=alone
        ) as rank_info:
            rows = learning.global_batch_size or learning.batch_size * rank_info.world_size * config.replica_count
            config, resume = _alike_on_ranks(config.changed(global_batch_size=rows), rank_info, resume)
            folder, is_first = own_folder(config, rank_info, lock)
            finish = _run(config, rank_info, folder, resume, lock, is_first)
        return finish()


def _run(
    config: TrainConfig, rank_info: RankInfo, folder: Path, resume: bool, lock: ExitStack, is_first: bool
) -> Callable[[], RunReport | None]:
    """All that takes every rank. Returns what is left to do for each alone, when the others are gone.

    Of elastic replicas the first one to start makes the plan, while it holds ``lock`` alone. The others find it.
    """
    announcer = Announcer(speaks=rank_info.is_lead)
    plan = _as_started(config, rank_info, folder, joins=not is_first) if resume else None
    spec = _own_spec(config, rank_info, folder, resume)
    source = Source(config, rank_info, spec, folder / ROWS)
    with _reading(rank_info) as progress:
        source.count(progress)
    if rank_info.is_lead and plan is None:
        announcer.say(source.describe())
    if config.feed is not None and plan is None and not _arrived(source, config.feed, time.sleep):
        raise DataError(
            f"{config.feed.source} has had nothing for {config.feed.feed_idle:g} s (--feed-idle): there is nothing to "
            "train on"
        )
    model, constraints = _sharded_model(config, source, spec, rank_info, plan)
    if rank_info.is_lead and plan is None:
        announcer.plan(model.plan)
    announcer.run(config, rank_info, source.batch_size)
    optimizer = dense_optimizer(model, config)
    evaluate = evaluator(config, spec, model, rank_info.device)
    run = Run(
        config=config,
        rank_info=rank_info,
        folder=folder,
        source=source,
        spec=spec,
        model=model,
        optimizer=optimizer,
        average=None if config.learning.ema is None else Average(model, optimizer, config.learning.ema),
        progress=Progress(
            world_size=rank_info.world_size,
            loss=RecentMean(rank_info.device),
            grad_norms={
                part: RecentMean(rank_info.device) for part in ("dense", "tables") if config.learning.clip is not None
            },
            watched=_watched(config),
        ),
        announcer=announcer,
        constraints=constraints,
        progressive=None if config.feed is None else Progressive(-(-_progressive_rows(config) // rank_info.world_size)),
    )
    elastic, phase = run.elastic, "new" if run.elastic is None else run.elastic.phase
    if phase == "ended":
        announcer.say(f"the run at {config.to_mapping()['elastic']} has ended: there is nothing to join")
        return lambda: None
    saver = Saver(run)
    goes_on = phase == "trains" or (resume and saver.has_checkpoints())
    if goes_on and phase == "new":
        saver.load()
    elif resume and elastic is None:  # as at the first start of a command with --resume, or in a folder by mistake
        announcer.say(f"{folder} has no checkpoint to continue from: the run begins")
    initial = config.learning.initial
    if (initial or config.learning.init_rows) and not goes_on:
        origin = ", ".join([*([initial.init_from] if initial else []), *config.learning.init_rows])
        announcer.say(f"from {origin}:\n{start_from(config, spec, model, rank_info)}")

    def describe() -> None:
        with replaced(folder / FILE) as file:
            file.write_text(config.to_yaml(), encoding="utf-8")
        if config.data.features is not None:
            with replaced(folder / SPEC) as file:
                file.write_text(Path(config.data.features).read_text(encoding="utf-8"), encoding="utf-8")
        _save_plan(run)

    if is_first and phase == "new":
        on_first_rank(describe, rank_info, "options and plan")
    if elastic is not None:
        on_first_rank(lambda: lock_folder(config, lock, "shared"), rank_info, "start of the other replicas")
        elastic.join(optimizer, run.progress)
        announcer.say(f"{elastic.replicas} replica(s) train, this one from step {elastic.steps:,}")
    anomalies = detect_anomaly(model) if config.ranks.detect_anomaly == "on" else nullcontext()
    with saver.watching(), anomalies:
        _train(run, saver, evaluate)
    if elastic is None:
        return _concluded(run, saver, evaluate)
    reports = list[RunReport | None]()
    elastic.end(lambda: reports.append(_concluded(run, saver, evaluate)()))
    return lambda: reports[0] if reports else None


def _concluded(
    run: Run, saver: Saver, evaluate: Callable[[Iterable[ClickBatch]], ClickMetrics | TaskMetrics]
) -> Callable[[], RunReport | None]:
    """Save and evaluate the trained model. Returns the writing of the results, for each rank alone."""
    config, rank_info, source, model, announcer = run.config, run.rank_info, run.source, run.model, run.announcer
    final_step = saver.finish()
    if run.progressive is not None and config.data.test is None:
        scored = run.progressive.metrics()
        if scored is None:  # for example where another number of ranks continued with nothing more to train on
            announcer.say("the feed has ended without rows that were scored: no new results are written")
            return lambda: None
        final: ClickMetrics | TaskMetrics = scored
    else:
        shown = working("final metrics") if rank_info.is_lead else nullcontext()
        with shown, run.evaluated(), Prefetcher(source.test_batches()) as batches:
            final = evaluate(failing_together(batches, model))
    samples = over_ranks(run.progress.rows, rank_info)
    left_out = dict(Counter(total_left_out(source.all_left_out())) + Counter(source.refused))

    def finish() -> RunReport | None:
        if not rank_info.is_lead:
            return None
        _save_plan(run)  # which may have changed
        report = _report(run, samples, final, final_step, left_out)
        with replaced(run.folder / METRICS) as file:
            write_metrics(report, file)
        with replaced(run.folder / "curve.png") as file:
            write_curve(report, file)
        announcer.results(report, run.folder)
        return report

    return finish


def _save_plan(run: Run) -> None:
    with replaced(run.folder / PLAN) as file:
        run.model.plan.save(file)


def _as_started(config: TrainConfig, rank_info: RankInfo, folder: Path, *, joins: bool) -> ShardingPlan | None:
    """The plan that the run has had so far, if it is for as many ranks and nothing else is asked for; else None.

    Raises:
        ConfigError: on every rank, if the run was started with other options.
    """
    files = [folder / FILE, folder / PLAN, folder / SPEC]
    there = rank_info.is_lead and all(file.is_file() for file in files[:2])
    options, plan, spec = (
        same_everywhere(file.read_text(encoding="utf-8") if there and file.is_file() else "", rank_info)
        for file in files
    )
    if not options:
        return None
    started = load_config_text(options, files[0])
    config.check_resumes(started.to_mapping(), joins=joins)
    if config.data.features is not None and parse_spec(spec, str(files[2])) != read_spec(Path(config.data.features)):
        raise ConfigError(
            f"features (--features) is {config.data.features!r}, which says something else than {files[2]}, with which "
            "the run was started: give that one, or start a new run in another folder (--out)"
        )
    try:
        saved_plan = ShardingPlan.from_json(parse_json(plan))
    except ValueError as error:
        raise ConfigError(f"{files[1]} is not the run's plan ({error}). Start a new run in another folder") from error
    if joins and saved_plan.world_size != rank_info.world_size:
        raise ConfigError(
            f"the replicas of the run in {folder} have {saved_plan.world_size} rank(s) each, and this one "
            f"{rank_info.world_size}: start {saved_plan.world_size}"
        )
    same = (config.ranks.plan, config.ranks.constraint) == (started.ranks.plan, started.ranks.constraint)
    return saved_plan if same and saved_plan.world_size == rank_info.world_size else None


def _reading(rank_info: RankInfo) -> AbstractContextManager[Callable[[int], object]]:
    """Shows on the first rank how many bytes of other formats than Parquet it has converted."""
    return working("reading files", unit="bytes") if rank_info.is_lead else nullcontext(lambda count: None)


def _own_spec(config: TrainConfig, rank_info: RankInfo, folder: Path, resume: bool) -> FeatureSpec:
    """The spec with the properties that the rows decide, which the run's folder keeps: its ids' spellings and
    vocabularies from data.

    The ranks decide together, each by its share of the files' row groups, and all meet the same fault.
    """
    spec = spec_of(config)
    if config.data.features is None:
        return spec
    uncounted, files = read_spec(Path(config.data.features)), (folder / IDS, folder / VOCABULARIES)

    def text_of(file: Path) -> str:
        return same_everywhere(read_text(file) if rank_info.is_lead and resume and file.is_file() else "", rank_info)

    ids, vocabularies = map(text_of, files)
    if not ids and text_of(folder / FILE):
        ids = json.dumps(FIRST_IDS)
    if not ids or (uncounted.uncounted and not vocabularies):
        spec = spec.with_ids(parse_json(ids)) if ids else spec
        with _reading(rank_info) as progress:
            spec = decided_spec(config, spec, rank_info, folder / ROWS, progress)
        counted = {feature.name for feature in uncounted.uncounted}
        values = {feature.name: feature.values for feature in spec.sparse if feature.name in counted}
        ids, vocabularies = json.dumps(recorded_ids(spec)), json.dumps(values, ensure_ascii=False, indent=0)

        def keep() -> None:
            for file, text in zip(files, (ids, vocabularies if values else ""), strict=True):
                if text:
                    with replaced(file) as partial:
                        partial.write_text(text, encoding="utf-8")

        on_first_rank(keep, rank_info, "ids and vocabularies")
    spec = uncounted.with_ids(parse_json(ids))
    return spec.with_vocabularies(parse_json(vocabularies)) if spec.uncounted else spec


def _sharded_model(
    config: TrainConfig, source: Source, spec: FeatureSpec, rank_info: RankInfo, plan: ShardingPlan | None
) -> tuple[ShardedModel, dict[str, Constraint]]:
    """The model, and the constraints that its plan has to meet."""
    model = build_model(config, spec.schema_)
    fault = export_fault(config, model, spec.schema_) if rank_info.is_lead else ""
    if fault:
        print(f"shardrec: warning: {fault}", file=sys.stderr, flush=True)
    if config.learning.loss == "model":
        model = with_own_loss(model, config.model.name)
    fuse_optimizer(model, config)
    dynamic = dynamic_tables(spec, model)
    constraints = planner_constraints(config, model, dynamic)
    if plan is None and config.ranks.plan is not None:
        try:
            plan = ShardingPlan.load(config.ranks.plan)
        except OSError as error:
            raise ConfigError(f"plan (--plan) is {config.ranks.plan!r}: {error.strerror}. Give a plan.json") from error
        if plan.world_size != rank_info.world_size:
            raise ConfigError(
                f"plan (--plan) is {config.ranks.plan!r}, which is for {plan.world_size} ranks, and there are "
                f"{rank_info.world_size}: start {plan.world_size} (--nproc {plan.world_size}), or leave it out"
            )
    if plan is None:
        from shardrec import plan as make_plan  # a fifth of the import time, which a resumed run does not need

        with working("planning") if rank_info.is_lead else nullcontext():
            plan = make_plan(
                model,
                batch_size=source.batch_size,
                constraints=constraints,
                sample_batches=source.sampled(_SAMPLED) or None,  # of a feed, all rows so far may be broken
                device=rank_info.device,
            )
    meet(rank_info, "agreement on the plan")  # the first rank has also looked for the best possible metrics
    replicas = config.ranks.replicas
    sharded = shard(
        model,
        plan,
        device=rank_info.device,
        dynamic_ids=dynamic,
        update="step" if config.learning.clip or config.learning.accumulate > 1 or config.learning.ema else "backward",
        replicas=None
        if replicas is None
        else Replicas(replicas.count, elastic=replicas.address, sync_every=config.ranks.sync_every),
    )
    if config.ranks.compile != "off":  # in rank_info, so that the model stays what the loop and the checkpoint know
        full = config.ranks.compile == "full"
        annotate_for_dynamo(sharded, mode="traced" if full else "boundary")
        sharded.compile(fullgraph=full)
    return sharded, constraints


def _alike_on_ranks(config: TrainConfig, rank_info: RankInfo, resume: bool) -> tuple[TrainConfig, bool]:
    """The options, with the folder of the first rank, and whether to continue, which a launcher may tell only the ranks
    of the host that had a fault.

    Raises:
        ConfigError: on every rank, if a rank was started with other options.
    """
    of_ranks, resumes = zip(*all_gather((config.to_mapping(), resume), rank_info, "start"), strict=True)
    first = of_ranks[0]
    differing = {name: options for options in of_ranks for name in options if options[name] != first[name]}
    faults = [
        f"{name} ({flag(name)}) is {options[name]!r} on rank {of_ranks.index(options)} and {first[name]!r} on rank 0: "
        "give all ranks the same"
        for name, options in differing.items()
        if name not in ("out", "threads")
    ]
    if faults:
        raise ConfigError(together(faults))
    return config.changed(out=first["out"]), any(resumes)


def _watched(config: TrainConfig) -> str:
    """The metric of the curve that compares points.

    Raises:
        ConfigError: if the loss needs groups that the rows lack, or the rows have several labels.
    """
    spec = spec_of(config)
    if spec.labels:
        if config.learning.loss != "bce" or config.learning.monitor is not None:
            raise ConfigError(
                f"the features (--features) name labels, which have losses of their own, and loss (--loss) is "
                f"{config.learning.loss!r}, monitor (--monitor) {config.learning.monitor!r}: leave both out"
            )
        return "loss"
    grouped = spec.group is not None or config.output.ranking != "rows"
    watched = config.learning.monitor or ("gauc" if grouped and config.learning.loss != "bce" else "logloss")
    if watched in ("gauc", "ndcg") and not grouped:
        raise ConfigError(
            f"monitor (--monitor) is {watched!r}, a metric of rows in groups, and the features (--features) "
            "name no group: give auc, logloss or ne, or add group: COLUMN"
        )
    return "normalized_entropy" if watched == "ne" else watched


def _train(run: Run, saver: Saver, evaluate: Callable[[Iterable[ClickBatch]], ClickMetrics | TaskMetrics]) -> None:
    config, source, model, progress = run.config, run.source, run.model, run.progress
    progressive = run.progressive
    # In memory: a file would have to be read to its end again for each point of the curve.
    curve_batches = [] if progressive else list(failing_together(source.holdout_batches(_CURVE_ROWS), model))

    if config.learning.patience is not None or config.output.checkpoint == "best":
        of_labels = not run.spec.labels and (
            config.output.ranking == "rows" or progress.watched not in ("gauc", "ndcg")
        )
        if of_labels and not progressive:
            check_monitor(curve_batches, progress.watched)

    def evaluated() -> ClickMetrics | TaskMetrics | None:
        if progressive is not None:
            return progressive.metrics()
        with run.evaluated():
            return evaluate(curve_batches)

    total_rows = None if progressive else source.train_rows * config.epochs
    evaluations = config.output.evaluations
    if progressive:
        evaluations = max(
            1, _progressive_rows(config) // (source.batch_size * run.rank_info.world_size * config.learning.accumulate)
        )

    def board(shown: Display) -> Display:
        return shown if run.elastic is not None and run.elastic.place else Board(shown, run)

    with run.announcer.display(total_rows, board) as display:
        last_step = 0 if progressive else source.steps * config.epochs
        replanner = None if config.ranks.replan is None else Replanner(run, config.ranks.replan, display, last_step)
        for _ in _epochs(run, saver):

            def read(replica: int = 0, replicas: int = 1) -> Iterator[StepPart]:
                batches = source.train_batches(progress.epoch_steps, progress.epoch, replica=replica, replicas=replicas)
                return step_parts(
                    batches, config.learning.accumulate, lambda: source.skipped, weighs_labels=run.spec.weighs_labels
                )

            with Prefetcher(read()) if run.elastic is None else DealtParts(run, run.elastic, read) as batches:
                train_epoch(
                    run,
                    batches,
                    schedule=Schedule(
                        total_steps=last_step,
                        evaluations=evaluations,
                        warmup=config.learning.warmup,
                        shape=config.learning.schedule,
                        decay=config.learning.decay,
                    ),
                    evaluate=evaluated,
                    display=display,
                    after_point=saver.after_point,
                    after_step=saver.after_step,
                    replanner=replanner,
                )
    patience = config.learning.patience
    if patience is not None and progress.steps < last_step and progress.stalled(patience):
        run.announcer.say(
            f"ended after {progress.samples:,} of {total_rows:,} samples: no better {progress.watched} "
            f"in {patience} point{'s' * (patience > 1)} (--patience)"
        )


def _epochs(run: Run, saver: Saver) -> Iterator[int]:
    """The numbers of the epochs that are left; of a feed, of its arrivals, without an end unless it is idle."""
    config, source, progress = run.config, run.source, run.progress
    while config.feed is None and progress.epoch < config.epochs and not progress.stalled(config.learning.patience):
        yield progress.epoch

    def wait(seconds: float) -> None:
        saver.after_step(idle=True)
        time.sleep(seconds)

    while config.feed is not None and _arrived(source, config.feed, wait):
        if source.lag:
            run.announcer.say(f"{source.lag:,} records behind the end of the topic")
        yield progress.epoch
        source.end_arrival()


def _arrived(source: Source, feed: FeedData, wait: Callable[[float], None]) -> bool:
    """Wait until rows of the feed have arrived. False, on all ranks after as many looks, if it has ended."""
    waited_s = 0.0
    while not source.poll(wait):
        if feed.feed_idle is not None and waited_s >= feed.feed_idle:
            return False
        wait(_POLL_S)
        waited_s += _POLL_S
    return True


def _progressive_rows(config: TrainConfig) -> int:
    return config.data.holdout_samples or _PROGRESSIVE_ROWS


def _report(
    run: Run, samples: int, final: ClickMetrics | TaskMetrics, final_step: int, left_out: Mapping[str, int]
) -> RunReport:
    return RunReport(
        config=run.config.to_mapping(),
        environment=environment(world_size=run.rank_info.world_size, threads=run.rank_info.threads),
        source=run.source.describe() if run.progressive else run.source.data.describe(),
        curve=tuple(run.progress.curve),
        final=final,
        optimum=run.source.best_metrics(),
        samples=samples,
        steps=run.progress.steps,
        final_step=final_step,
        seconds=run.progress.seconds,
        skipped=left_out,
    )
