"""A training loop that works ahead: ids are exchanged, and inputs copied, while the batch before is computed.

::

    depth 2, step i     copy of batch i+2 to the device
                        batch i+1: checked and cut
                        batch i:   lookup, rows ──► dense part's forward ──► loss
                        batch i+1: headers; ids on their way ─────────────────────────┐
                        batch i:   dense part's backward, gradients of rows ──► update │
    step i+1            batch i+1: the ids are there ◄─────────────────────────────────┘

The user's own stages, functions from batch to batch, come between the copy and the check, and look one batch further
ahead for each further stage. Modules of the model that make features of the batch run ahead, too
(:mod:`shardrec.pipeline.feature_sources`).

Each step looks its rows up after the last update, so that losses are bit-identical to the plain loop's. How far
the loop looks ahead is its depth: 0, the plain loop; 1, batch i+1 is copied and its ids are exchanged in step i; 2,
batch i+2 is also copied in step i.

[Note: failing while another batch is under way]
In step i the headers of batch i+1 are exchanged between forward and backward. A rank after a failed forward still looks
up and sends what the others wait for, and then tells them in that header, so that none begins a backward. A batch i+1
that is faulty is also reported there, and raised in its own step: batch i is trained on first, as in the plain loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from shardrec.errors import ConfigError
from shardrec.modules.clipping import check_clipping, clip_by_norm
from shardrec.modules.sharded_model import ShardedModel
from shardrec.pipeline.lookahead import Lookahead


class TrainPipeline:
    """Trains a sharded model, working ahead on the next batches. An iterator over its steps.

    ::

        pipeline = TrainPipeline(model, optimizer, loader, loss_fn=lambda model, batch: loss(model(batch.x), batch.y))
        for epoch in range(3):
            for loss in pipeline:
                ...

    A loop after the last batch, or after :meth:`close`, is another pass over the dataloader. A program that has an
    iterator calls :meth:`progress` instead of the loop.

    Which features each sharded module is called with is read from the first step: they have to be KeyedJaggedTensors
    that the batch holds (in a tuple, list, dict, dataclass or other object), or that a post-processor makes of it: a
    module of the model without parameters that take gradients. A post-processor runs once for each batch, ahead of
    its step, so that random numbers are drawn in another order. Where features are made in another way, their ids
    are exchanged in their own step, which a warning says once; :attr:`modules_ahead` has the modules that run ahead.

    A step that raises leaves the pipeline usable: its batch is lost, and the next ``next()`` takes the next one. If its
    backward raises, so are the batches that its update has accumulated.

    Args:
        model: from :func:`shardrec.shard`, or any module. Its inputs are then only copied ahead.
        optimizer: of the model, one or several (fused ones update in backward). Each step clears gradients and updates.
        dataloader: batches; as many on every rank. An iterator, such as a generator, gives a single pass. Tensors,
            tuples, lists and dicts of them, or objects with a method ``to(device, non_blocking)``. As in TorchRec it
            may be the device, for a program that calls :meth:`progress`.
        loss_fn: from model and batch to the loss, or a tuple that begins with it. Default: calls ``model(batch)``.
        depth: 0, 1 or 2. See above.
        accumulate: batches of an update: it takes the mean of their gradients, as of one batch with the rows of all. If
            the batches end before, it is made with those that there are, each with the same share.
        clip_norm: largest norm of an update's gradients (:func:`shardrec.clip_grad_norm_`). Default: any.
        device: where batches are copied to. Default: the device of the sharded model, or of the first parameter.
        stages: functions from a batch on the device to a batch, without gradients, such as a transformation on the GPU.
            A batch passes one in each step before its own. On CUDA each runs on a stream of its own.

    Raises:
        ConfigError: for another depth; for several batches an update, if the model's tables are updated in backward;
            for ``clip_norm``, if :func:`shardrec.clip_grad_norm_` refuses the model; if ``device`` is given twice.

    Attributes:
        grad_norms: (2,) float32, the norms of the last update's gradients before they were clipped, of the dense part
            and of the tables. None without ``clip_norm``.

    The idea is from TorchRec's ``TrainPipelineSparseDist``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dataloader: Iterable[object] | torch.device | None = None,
        *,
        loss_fn: Callable[[nn.Module, Any], Any] | None = None,
        depth: int = 2,
        accumulate: int = 1,
        clip_norm: float | None = None,
        device: torch.device | str | None = None,
        stages: Sequence[Callable[[Any], Any]] = (),
    ) -> None:
        if isinstance(dataloader, torch.device):
            if device is not None:
                raise ConfigError(f"device is given twice, as {dataloader} and {device}. Leave one out")
            dataloader, device = None, dataloader
        if depth not in (0, 1, 2):
            raise ConfigError(f"depth is {depth!r}: give 0 (the plain loop), 1 or 2")
        if accumulate < 1:
            raise ConfigError(f"accumulate is {accumulate!r}: give a number of batches, 1 or more")
        if accumulate > 1 and isinstance(model, ShardedModel) and (fault := model.update_in_backward()):
            raise ConfigError(f"accumulate is {accumulate}, but of this model, {fault}")
        if clip_norm is not None:
            check_clipping(model, "TrainPipeline(clip_norm=)")
        self._model = model
        self._accumulate, self._accumulated = accumulate, 0
        self._clip_norm = clip_norm
        self.grad_norms: Tensor | None = None
        self._optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        self._loss_fn = loss_fn or operator.call
        context = model.context if isinstance(model, ShardedModel) else None
        if device is None:
            device = (
                next((parameter.device for parameter in model.parameters()), "cpu")
                if context is None
                else context.device
            )
        target = torch.device(device)
        self._ahead = partial(Lookahead, context=context, depth=depth, device=target, model=model, stages=stages)
        self._steps = self._ahead(() if dataloader is None else dataloader)
        self._has_dataloader = dataloader is not None

    @property
    def modules_ahead(self) -> list[nn.Module]:
        """The post-processors that run ahead, and the sharded modules that exchange ids ahead."""
        return self._steps.modules_ahead

    def __iter__(self) -> Self:
        if not self._has_dataloader:
            raise ConfigError(
                "this TrainPipeline lacks a dataloader to loop over: give it one, or call progress(iterator)"
            )
        self._steps.begin_pass()
        return self

    def __next__(self) -> Any:
        """Train on the next batch.

        Returns:
            What ``loss_fn`` returned.

        Raises:
            StopIteration: after the last batch.
            ConfigError: in another pass, if the dataloader lacks a batch for it.
            InputError: on every rank, if the batch, or the model's forward on it, fails on any.
        """
        try:
            result = self._steps.step(self._loss)
        except StopIteration:
            self.update()
            raise
        loss: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        if self._accumulate > 1:
            loss = loss / self._accumulate
        try:
            loss.backward()  # type: ignore[no-untyped-call,unused-ignore]  # untyped in some releases of torch
        except BaseException:
            self._accumulated = 0  # the gradients are a part of the batch's: the next step clears them
            raise
        self._accumulated += 1
        if self._accumulated == self._accumulate:
            self.update()
        return result

    def progress(self, dataloader_iter: Iterator[object]) -> Any:
        """Train on the next batch of an iterator, as TorchRec's pipelines do, and look ahead in it.

        Args:
            dataloader_iter: batches. Those of another iterator come after the batches in progress.

        Returns:
            Of a pair of loss and output, as ``loss_fn`` returns it, the output; else what ``loss_fn`` returned.

        Raises:
            StopIteration: after the last batch.
            InputError: as ``next()``.
        """
        self._steps.go_on_with(dataloader_iter)
        result = next(self)
        return result[1] if isinstance(result, (tuple, list)) and len(result) == 2 else result

    def update(self) -> None:
        """Make the update with the batches since the last one, if there are any. Every rank calls it."""
        if not self._accumulated:
            return
        self._accumulated = 0
        if self._clip_norm is not None:
            _, self.grad_norms = clip_by_norm(self._model, self._clip_norm)
        for optimizer in self._optimizers:
            optimizer.step()

    def close(self) -> None:
        """Drop the batches in progress, if a loop ends before its dataloader.

        Every rank calls it after the same step. The next loop is another pass, and :meth:`progress` goes on in its
        iterator.
        """
        self._steps.close()

    def evaluate(self, dataloader: Iterable[object]) -> Iterator[Any]:
        """Iterate over what ``loss_fn`` returns for each batch, in evaluation mode and without gradients."""
        return self.predict(dataloader, self._loss_fn)

    def predict(
        self, dataloader: Iterable[object], forward: Callable[[nn.Module, Any], Any] | None = None
    ) -> Iterator[Any]:
        """Iterate over the model's outputs, in evaluation mode and without gradients.

        Args:
            dataloader: batches, as many on every rank.
            forward: from model and batch to the output. Default: ``model(batch)``.
        """
        steps = self._ahead(dataloader)
        while True:
            # Between two outputs the caller may train. A module that is frozen stays in its own mode.
            modes = {module: module.training for module in self._model.modules()}
            self._model.eval()
            try:
                with torch.no_grad():
                    output = steps.step(lambda batch: (forward or operator.call)(self._model, batch))
            except StopIteration:
                return
            finally:
                for module, training in modes.items():
                    module.training = training
            yield output

    def _loss(self, batch: object) -> Any:
        if not self._accumulated:
            for optimizer in self._optimizers:
                optimizer.zero_grad(set_to_none=True)
        return self._loss_fn(self._model, batch)
