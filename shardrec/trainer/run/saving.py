"""Decides when a run saves and when it ends early, and saves the state that it needs to resume bit-identically.

Steps are the same on all ranks. Clocks, signals and the end of a write are not. On these the ranks agree about
twice a second, in one all-reduce of six numbers. Its result also says after how many steps the next one is:

    step      … 41    42    43    44 …                              (a signal on rank 1 in step 42)
    rank 0         │     │     │  ├─ all-reduce(max): end ─► save, leave
    rank 1         │   ! │     │  ├─ all-reduce(max): end ─► save, leave
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec import CheckpointError, Checkpoints, ConfigError, ShardingPlan, load_checkpoint
from shardrec.checkpoint import PendingSave, read_manifest
from shardrec.launch import RunStopped, StopRequest, on_first_rank, over_ranks, peers, same_everywhere
from shardrec.trainer.data.rows import NO_TIME
from shardrec.trainer.run.config import CHECKPOINTS
from shardrec.trainer.run.folder import locked
from shardrec.trainer.run.model import changed_source, source_digest
from shardrec.trainer.run.run import Run

if TYPE_CHECKING:
    from shardrec import Publisher

_AGREE_S = 0.5
_MAX_STEPS = 1000
_LOCK_S = 10.0
"""How long a replica waits for another one that has saved before it."""


class Saver:
    """Saves a run, and restores it. Every rank has one and calls it at the same steps.

    Args:
        run: its model, optimizers, progress, counts of ids and of rows left out are saved, and its model is published.
            Its announcer is told of a checkpoint once that is on disk.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._config, self._place, self._progress = run.config, run.rank_info, run.progress
        self._checkpoints = Checkpoints(
            run.folder / CHECKPOINTS,
            keep_last=run.config.output.keep_checkpoints,
            incremental=run.config.output.checkpoint_incremental,
        )
        self._publisher: Publisher | None = None
        if run.config.output.publish is not None:
            from shardrec import Publisher  # with fbgemm's inference kernels

            self._publisher = Publisher(run.model, run.config.output.publish, run.config.output.publish_weights)
        self._published = PendingSave()
        self._published_at = time.monotonic()
        self._published_step: int | None = None
        self._stop = StopRequest()
        self._pending: PendingSave | None = None
        self._lock = ExitStack()  # of the checkpoints, while one of several replicas saves
        self._saved_step: int | None = None
        self._saved_at = self._agreed_at = time.monotonic()
        self._agreed_step = self._agree_at = 0

    def has_checkpoints(self) -> bool:
        """Whether there is something to :meth:`load`, as the first rank sees it."""
        return bool(same_everywhere("yes" if self._checkpoints.paths() else "", self._place))

    def load(self) -> None:
        """Put the last good checkpoint into the model, the optimizers, the source and the progress.

        On another number of ranks the rows before it are counted as if these ranks had read them, and random numbers
        begin again from the seed.

        Raises:
            ConfigError: if it is one of a run with other options.
            DataError: if it is one of a run with other files.
            CheckpointError: if all of them are damaged.
        """
        loaded = self._checkpoints.load_last(self._run.model, self._run.optimizer)
        assert loaded is not None, "there was a checkpoint when this was called, and this run has locked the folder"
        self._config.check_resumes(loaded.extra["config"])
        options, started = self._config.to_mapping(), loaded.extra["config"]
        if self._run.elastic is None and all(started.get(name) == options[name] for name in ("plan", "constraint")):
            saved_plan = on_first_rank(lambda: read_manifest(loaded.path).plan, self._place, "plan of the checkpoint")
            plan = ShardingPlan.from_json(saved_plan)  # which --replan may have changed since plan.json was written
            if plan.world_size == self._place.world_size and plan != self._run.model.plan:
                self._run.model.reshard(plan, self._run.optimizer)
        feed, rank_state = loaded.extra["feed"], loaded.rank_state
        if feed is not None:
            self._run.source.seek(feed[0], in_arrival=feed[1], latest=float(rank_state.get("latest", NO_TIME)))
        self._run.source.check_resumes(loaded.extra["data"])
        samples, rank_info = int(loaded.extra["samples"]), self._place
        rows = samples * (rank_info.rank + 1) // rank_info.world_size - samples * rank_info.rank // rank_info.world_size
        self._progress.load(loaded.extra["progress"], rows=int(rank_state["rows"]) if rank_state else rows)
        if feed is not None and self._progress.epoch_steps and not feed[1]:
            self._progress.next_epoch()
        self._run.source.load_left_out(loaded.extra["left_out"])
        self._run.load_id_counts(loaded.extra["ids"])
        if rank_state:
            torch.set_rng_state(rank_state["random"])
        if self._run.progressive is not None and "scored" in rank_state:
            self._run.progressive.load(rank_state["scored"])
        if "cuda_random" in rank_state:
            torch.cuda.set_rng_state(rank_state["cuda_random"], rank_info.device)
        self._saved_step = self._agreed_step = self._agree_at = loaded.step
        changed = changed_source(self._config.model.name, loaded.extra)
        if changed:
            self._run.announcer.say(f"warning: {changed}")
        self._run.announcer.say(f"continuing from the checkpoint of step {loaded.step:,}")

    def watching(self) -> AbstractContextManager[object]:
        """Inside, SIGTERM and Ctrl-C end the run after a step and a save, if it saves at all before its end."""
        return nullcontext() if self._config.output.checkpoint_every is None else self._stop

    def after_step(self, *, idle: bool = False) -> None:
        """Save and publish if it is time.

        Args:
            idle: whether no step was made since the last call, for want of rows.

        Raises:
            RunStopped: on every rank, after a save, if any was told to end.
        """
        if self._config.output.checkpoint_every is None and self._publisher is None:
            return
        steps, evaluated_at = self._progress.steps, self._progress.evaluated_at
        due, publish = (
            interval is not None and not idle and (steps % interval if interval else steps - evaluated_at) == 0
            for interval, _ in (self._config.output.checkpoint_interval, self._config.output.publish_interval)
        )
        ends = False
        if steps > self._agree_at or idle:
            ends, save_timely, publish_timely = self._agree()
            due, publish = due or save_timely, publish or publish_timely
        if publish and steps != self._published_step:
            self._publish(steps)
        if due or ends:
            self._save()
        if ends:
            self._acknowledge()
            self._wait_for_publish()
            raise RunStopped(steps, str(self._run.folder))

    def after_point(self) -> None:
        """Save if the last point of the curve is the best one, and that is what is kept."""
        if self._config.output.checkpoint == "best" and self._progress.improved():
            self._progress.best_step = self._progress.steps
            self._save()

    def finish(self) -> int:
        """Save and publish the trained model, if the options ask for it, and wait until that is done.

        Returns:
            The step of the weights that the model then has: the best step, if its weights are kept.
        """
        step = self._save_last()
        if self._publisher is not None:
            self._publish(step)
            self._wait_for_publish()
        return step

    def _save_last(self) -> int:
        if self._config.output.checkpoint != "none":
            self._save()
        self._acknowledge()
        steps, best = self._progress.steps, self._progress.best_step
        if self._config.output.checkpoint != "best" or best == steps:
            return steps
        path = None if best is None else self._checkpoints.paths().get(best)
        if not same_everywhere(str(path or ""), self._place):
            self._run.announcer.say("the best point lacks a checkpoint: the final metrics are of the last weights")
            return steps
        load_checkpoint(str(path), self._run.model, self._run.optimizer)
        return best or steps

    def _agree(self) -> tuple[bool, bool, bool]:
        """(whether to end, whether a save is due by the clock, whether a publish is), the same on all ranks.
        Acknowledges what is written."""
        now, steps = time.monotonic(), self._progress.steps
        output = self._config.output
        (_, wait_s), (_, publish_s) = output.checkpoint_interval, output.publish_interval
        pace = (now - self._agreed_at) / max(1, steps - self._agreed_step)
        said = torch.tensor(
            [
                self._stop.made,
                wait_s is not None and now - self._saved_at >= wait_s,
                self._pending is not None and not self._pending.done,
                publish_s is not None and now - self._published_at >= publish_s,
                not self._published.done,
                min(_MAX_STEPS, int(_AGREE_S / max(pace, 1e-6))),
            ],
            dtype=torch.int64,
        )
        if self._place.world_size > 1:
            with peers(None, "agreement on saving"):
                dist.all_reduce(said, dist.ReduceOp.MAX)
        ends, timely, writing, publish_timely, publishing, skipped = map(int, said)
        self._agreed_at, self._agreed_step, self._agree_at = now, steps, steps + skipped
        if not writing:
            self._acknowledge()
        return bool(ends), bool(timely), bool(publish_timely and not publishing)

    def _publish(self, step: int) -> None:
        """Begin to publish. The evaluated weights, which a run may average."""
        assert self._publisher is not None, "a publish is due"
        self._wait_for_publish()
        with self._run.evaluated():
            self._published = self._publisher.publish(extra={"step": step}, wait=False)
        self._published_at, self._published_step = time.monotonic(), step

    def _wait_for_publish(self) -> None:
        """Training continues after a publish that failed, on all ranks: the next version is complete in itself."""
        try:
            self._published.wait()
        except (CheckpointError, ConfigError) as error:
            self._run.announcer.say(f"warning: nothing was published ({error}). The next version has all rows")

    def _save(self) -> None:
        """Begin to save, unless this step is saved."""
        steps = self._progress.steps
        if self._saved_step == steps:
            return
        with self._progress.off_the_clock():
            self._acknowledge()
            if not self._is_to_save():
                return
            samples = over_ranks(self._progress.rows, self._place)
            extra = {
                "config": self._config.to_mapping(),
                "model_source": source_digest(self._config.model.name),
                "samples": samples,
                "progress": self._progress.state(),
                "left_out": self._run.source.all_left_out(),
                "data": self._run.source.digests(),
                "feed": self._run.source.position(self._progress.epoch_steps),
                "ids": self._run.id_counts(),
            }
            self._checkpoints.pinned = self._progress.best_step
            self._pending = self._checkpoints.save(
                steps, self._run.model, self._run.optimizer, extra, rank_state=self._own_state(), wait=False
            )
        self._saved_step, self._saved_at = steps, time.monotonic()

    def _is_to_save(self) -> bool:
        """Whether this replica saves, which the first one does. It has then locked the checkpoints."""
        if self._run.elastic is None:
            return True
        if self._run.elastic.place:
            return False

        def lock() -> bool:
            folder = self._checkpoints.folder
            folder.mkdir(exist_ok=True)
            return self._lock.enter_context(locked(folder, _LOCK_S)) is not None

        has_lock = on_first_rank(lock, self._place, "lock of the checkpoints")
        if not has_lock:
            self._run.announcer.say("warning: another replica is still saving: this one does not save now")
        return has_lock

    def _own_state(self) -> dict[str, Tensor]:
        state = {"rows": torch.tensor(self._progress.rows), "random": torch.get_rng_state()}
        if self._run.progressive is not None:
            state["scored"] = self._run.progressive.state()
            state["latest"] = torch.tensor(self._run.source.latest(), dtype=torch.float64)
        if self._place.device.type == "cuda":
            state["cuda_random"] = torch.cuda.get_rng_state(self._place.device)
        return state

    def _acknowledge(self) -> None:
        """Wait until what is being saved is on disk, and say so."""
        if self._pending is None:
            return
        self._pending.wait()
        self._pending = None
        self._lock.close()
        if self._run.source.lag is not None:
            oldest = next(iter(self._checkpoints.paths().values()))
            self._run.source.remove_before(read_manifest(oldest).extra["feed"][0])
        self._run.announcer.say(f"saved the checkpoint of step {self._saved_step:,}")
