"""A sequential in stages, between which micro-batches flow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, Literal, Self, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.pipeline.balance import check_balance
from shardrec.pipeline.layers import check_layers
from shardrec.pipeline.mini_batch import Run
from shardrec.pipeline.schedule import SCHEDULES, Schedule, ScheduleName, only
from shardrec.pipeline.skip.routes import skip_routes
from shardrec.pipeline.stage import Checkpoint, Stage
from shardrec.pipeline.stage_channel import Peers
from shardrec.pipeline.timeline import Recorder, Timeline


class Pipeline(nn.Module):
    """A sequential cut into stages, which work on micro-batches at the same time.

    In one process, stage s is on ``devices[s]``: stages on the CPU have a thread each, stages on CUDA devices are
    issued by the caller's thread in the schedule's order. Over a process group, stage s is on rank s, which keeps the
    parameters of its own layers only. Names of parameters and keys of the state dict equal the sequential's.

    ::

        pipeline = Pipeline(model, balance=[2, 3], devices=["cuda:0", "cuda:1"], chunks=8)
        loss = pipeline.step(inputs, targets, loss_fn=nn.functional.cross_entropy)     # forward and backward
        optimizer.step()

    Skips (:mod:`shardrec.pipeline.skip`) go from the stage that stashes them straight to the stage that pops them, and
    their gradients go straight back. Running statistics of batch norms are computed over the mini-batch, and updated
    once a step.

    Args:
        module: an ``nn.Sequential``. Each layer takes the output of the previous layer: a tensor, or a nest of tensors.
        balance: number of layers per stage (see :func:`balance_by_size`, :func:`balance_by_time`).
        devices: of the stages. Default: the CPU for each. Over a group: this rank's device, as a list of one.
        group: the process group, with a rank for each stage. None: all stages are in this process.
        chunks: micro-batches that a mini-batch is cut into. There are fewer if it has fewer samples.
        schedule: of :meth:`step`: ``"gpipe"`` or ``"1f1b"``.
        checkpoint: which micro-batches are recomputed in backward and only keep their stages' inputs. ``"always"``,
            ``"except_last"`` (in GPipe the last stage's backward follows immediately) or ``"never"``.

    Attributes:
        balance: as given.
        chunks: as given.
        checkpoint: as given.
        devices: of the stages in this process.

    Raises:
        TypeError: if ``module`` is not a sequential, or its skips do not match.
        ConfigError: if the balance does not fit, stages share parameters, a layer reduces gradients or updates weights
            by itself, there are too few devices or ranks, or an option is unknown.

    The schedules are described in :mod:`shardrec.pipeline.schedule`. The interface follows torchgpipe (Kim et al.,
    2020).
    """

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int],
        *,
        devices: Sequence[torch.device | str] | None = None,
        group: dist.ProcessGroup | None = None,
        chunks: int = 1,
        schedule: ScheduleName = "gpipe",
        checkpoint: Checkpoint = "except_last",
    ) -> None:
        super().__init__()
        self.balance = check_balance(module, balance)
        check_layers(module)
        stages = len(self.balance)
        _check_options(chunks, schedule, checkpoint)
        self.chunks = chunks
        self.schedule = schedule
        self.checkpoint: Checkpoint = checkpoint
        self.stages = stages
        stage_devices = ["cpu"] * (1 if group is not None else stages) if devices is None else devices
        self.devices = [_numbered(torch.device(device)) for device in stage_devices]
        needed = stages if group is None else 1
        if len(self.devices) < needed:
            raise ConfigError(
                f"balance has {stages} stages and devices are {[str(device) for device in self.devices]}: give a "
                "device for each stage"
            )
        self.devices = self.devices[:needed]
        if group is not None and dist.get_world_size(group) != stages:
            raise ConfigError(
                f"balance has {stages} stages and the group has {dist.get_world_size(group)} ranks: every stage needs "
                "a rank of its own"
            )
        routes = skip_routes(module, self.balance)
        local_numbers = range(stages) if group is None else [dist.get_rank(group)]
        ends = [0, *accumulate(self.balance)]
        named = list(zip(module._modules, module, strict=True))
        self.local_stages: list[Stage] = []
        for number, device in zip(local_numbers, self.devices, strict=True):
            layers = []
            for name, layer in named[ends[number] : ends[number + 1]]:
                if hasattr(self, name):
                    raise ConfigError(
                        f"a layer is named {name!r}, which is a name of the pipeline's own: give the layer another one"
                    )
                self.add_module(name, layer.to(device))
                layers.append(layer)
            self.local_stages.append(Stage(number, stages, layers, device, routes))
        self.peers = None if group is None else Peers(group, self.devices[0])
        self.recorder: Recorder | None = None
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        """Number of layers, of this rank's stage over a group."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers."""
        return iter(self._modules.values())  # type: ignore[arg-type]  # none of them is None

    def __getitem__(self, index: int) -> nn.Module:
        """A layer, by number."""
        return list(self)[index]

    def __getstate__(self) -> dict[str, object]:
        if self.peers is not None:
            raise ConfigError(
                "a pipeline over a process group cannot be copied or pickled: copy its state_dict, which has the "
                "sequential's keys"
            )
        return self.__dict__ | {"_pool": None, "recorder": None}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Change the dtype of layers, which stay on their stages' devices."""
        for device in dict.fromkeys(self.devices):
            if fn(torch.empty(0, device=device)).device != torch.empty(0, device=device).device:
                raise ConfigError(
                    f"the stages of a pipeline are on {', '.join(map(str, self.devices))} and cannot be moved: give "
                    "devices= to Pipeline"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, input: object) -> object:
        """The sequential's forward, in micro-batches.

        In one process, ``backward()`` from the output is also pipelined, in GPipe's order, and adds to the parameters'
        ``.grad`` (``torch.autograd.grad`` with respect to parameters, and a second backward, are not supported). Over
        a group it is for evaluation: it has to run without gradients.

        Args:
            input: a (B, ...) tensor, or tuples, lists and dicts of them; over a group, the first stage's counts.

        Returns:
            The output, on the last stage's device. Over a group None on the other ranks.

        Raises:
            ConfigError: if tensors have different numbers of samples, or over a group gradients are on.
            PipelineError: on every other rank, if a stage fails; in the process where it does, its own exception.
        """
        with_gradients = torch.is_grad_enabled()
        if with_gradients and self.peers is not None:
            raise ConfigError(
                "Pipeline.forward over a process group computes no gradients, for backward has to run on all of its "
                "ranks: train with Pipeline.step, and evaluate inside torch.no_grad()"
            )
        run = self._run(input, with_gradients=with_gradients)
        run.execute(only("F", self.schedule_of(run.batches)))
        return run.output() if with_gradients else run.values()

    def step(
        self,
        input: object,
        target: object = None,
        *,
        loss_fn: Callable[[Any, Any], Tensor],
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Forward and backward of a mini-batch in the pipeline's schedule. Gradients are added to ``.grad``.

        Args:
            input: as of :meth:`forward`. Over a group, the first stage's counts.
            target: a nest of (B, ...) tensors, cut as the input is; over a group, the last stage's counts.
            loss_fn: from a micro-batch's output and target to its scalar loss.
            reduction: how ``loss_fn`` reduces over samples: the mean of micro-batches is weighted by their samples, so
                that loss and gradients equal the whole mini-batch's.

        Returns:
            The mini-batch's loss, 0-d, without a graph. Over a group on every rank.

        Raises:
            ConfigError: if tensors have different numbers of samples.
            PipelineError: on every other rank, if a stage fails; in the process where it does, its own exception.
        """
        if reduction not in ("mean", "sum"):
            raise ConfigError(f"reduction is {reduction!r}: give 'mean' or 'sum', as loss_fn reduces over samples")
        with torch.enable_grad():
            run = self._run(input, with_gradients=True)
            run.set_loss(target, loss_fn, mean=reduction == "mean")
            run.execute(self.schedule_of(run.batches))
            run.input_backward()
            return run.total_loss()

    def _run(self, input: object, *, with_gradients: bool) -> Run:
        return Run(
            self.local_stages,
            self.peers,
            self.threads(),
            input,
            chunks=self.chunks,
            checkpoint=self.checkpoint,
            recorder=self.recorder,
            with_gradients=with_gradients,
        )

    def schedule_of(self, batches: int) -> Schedule:
        """The schedule for a number of micro-batches."""
        return SCHEDULES[self.schedule](self.stages, batches)

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes of tensors that this rank has sent so far, by stage. Empty in one process."""
        return {} if self.peers is None else dict(self.peers.sent_bytes)

    @contextmanager
    def record(self) -> Iterator[Timeline]:
        """Note when stages compute and wait. Over a group on all ranks, which all get all the spans.

        Yields:
            The timeline, filled at the end of the block.
        """
        self.recorder = recorder = Recorder()
        timeline = Timeline([])
        try:
            yield timeline
        finally:
            self.recorder = None
        recorder.finish()
        spans = [recorder.spans] if self.peers is None else self.peers.gather(recorder.spans)
        timeline.spans.extend(span for of_rank in spans for span in of_rank)

    def threads(self) -> ThreadPoolExecutor | None:
        """A thread per stage, if all of several stages are on the CPU."""
        if self.peers is not None or self.stages == 1 or any(device.type != "cpu" for device in self.devices):
            return None
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.stages, thread_name_prefix="stage")
        return self._pool


def _numbered(device: torch.device) -> torch.device:
    """The device with its CUDA number, because the current device differs between threads."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_options(chunks: int, schedule: str, checkpoint: str) -> None:
    if chunks < 1:
        raise ConfigError(f"chunks is {chunks}: give the number of micro-batches, at least 1")
    for name, value, known in (
        ("schedule", schedule, get_args(ScheduleName)),
        ("checkpoint", checkpoint, get_args(Checkpoint)),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}: give one of {', '.join(map(repr, known))}")
