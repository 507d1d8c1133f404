"""TorchRec's names by those of shardrec, as its own tests call them.

These are the changes that docs/migration.md asks of a program, and no more: ``fused_params`` become
``apply_optimizer_in_backward``, codecs ``comms=``, ``DMPCollection`` ``replicas=``. TorchRec drops the optimizer in
backward of data-parallel tables and of those with a dense kernel, and so it is dropped here.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner import Topology as TorchRecTopology
from torchrec.distributed.types import ShardingPlan as TorchRecPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping
from torchrec.optim.keyed import CombinedOptimizer

import shardrec
from shardrec.errors import ConfigError
from shardrec.modules.collection import ShardedCollection
from shardrec.pipeline import TrainPipeline
from shardrec.planner import from_torchrec
from shardrec.replicas import ReplicatedModel

__all__ = ["COMMS", "DMPCollection", "DistributedModelParallel", "NoCounterpart", "put_into"]

COMMS: list[Any] = [None]
"""The ``QCommsConfig`` of the test that runs; a registry of codecs does not tell it."""


class NoCounterpart(NotImplementedError):
    """A test asks for what shardrec leaves out; docs/ledger.md says why."""


def _optimizer(fused_params: Mapping[str, Any]) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer that fbgemm's kernels have by ``fused_params``, with their defaults."""
    kind = fused_params.get("optimizer", "EXACT_SGD")
    kind = str(getattr(kind, "name", kind)).upper()
    settings = {"lr": fused_params.get("learning_rate", 0.01)}
    if fused_params.get("weight_decay"):
        settings["weight_decay"] = fused_params["weight_decay"]
    if "SGD" in kind:
        return torch.optim.SGD, settings
    settings["eps"] = fused_params.get("eps", 1e-8)
    if "ADAGRAD" in kind:
        return torchrec.optim.RowWiseAdagrad if "ROWWISE" in kind else torch.optim.Adagrad, settings
    if kind == "ADAM":
        settings["betas"] = (fused_params.get("beta1", 0.9), fused_params.get("beta2", 0.999))
        return torch.optim.Adam, settings
    raise NoCounterpart(f"optimizer {kind}")


def _tables(module: nn.Module, plan: TorchRecPlan) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """The sharding and the parameters of each table of a plan."""
    modules = dict(module.named_modules())
    for path, tables in plan.plan.items():
        named = list(modules[path].named_parameters())
        for table, sharding in tables.items():  # type: ignore[attr-defined]
            yield sharding, [parameter for name, parameter in named if table in name.split(".")]


def _give_optimizers(module: nn.Module, plan: TorchRecPlan | None, sharders: Sequence[Any]) -> None:
    """Do by ``apply_optimizer_in_backward`` what TorchRec's sharders do by ``fused_params``."""
    given = [sharder.fused_params for sharder in sharders if getattr(sharder, "fused_params", None)]
    for sharding, parameters in () if plan is None else _tables(module, plan):
        dense = "dense" in (sharding.compute_kernel, "dense" if sharding.sharding_type == "data_parallel" else "")
        for parameter in parameters:
            if dense and hasattr(parameter, "_in_backward_optimizers"):
                del parameter._in_backward_optimizers
            if given and not dense and not hasattr(parameter, "_in_backward_optimizers"):
                optimizer, settings = _optimizer(given[-1])
                apply_optimizer_in_backward(optimizer, [parameter], settings)


def _comms(sharders: Sequence[Any]) -> shardrec.QuantizedComms | None:
    if not any(getattr(sharder, "qcomm_codecs_registry", None) for sharder in sharders):
        return None
    config = COMMS[0]
    formats = [precision.name.lower() for precision in (config.forward_precision, config.backward_precision)]
    return shardrec.QuantizedComms(output=formats[0], gradient=formats[1])  # type: ignore[arg-type]


def _sharded(module: nn.Module, plan: Any, sharders: Sequence[Any], **options: Any) -> Any:
    _give_optimizers(module, plan, sharders)
    group = options.get("group")
    for parameter in module.parameters() if dist.is_initialized() and dist.get_world_size(group) > 1 else ():
        if not parameter.is_meta:  # TorchRec draws new values; shardrec keeps those of before, which are to be equal
            dist.broadcast(parameter.detach(), dist.get_global_rank(group or dist.group.WORLD, 0), group)
    model = shardrec.shard(module, plan, comms=_comms(sharders), **options)
    model._plan = plan
    return model


class DistributedModelParallel:
    """``shardrec.shard``, with TorchRec's signature."""

    def __new__(  # type: ignore[misc]  # it is a function with a static method
        cls,
        module: nn.Module,
        env: Any = None,
        device: Any = None,
        plan: Any = None,
        sharders: Sequence[Any] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        **_: Any,
    ) -> Any:
        group = None if env is None else env.process_group
        for sharder in sharders or ():
            if "uvm" in str(getattr(sharder, "_kernel_type", "")):  # of caches on a GPU
                sharder._kernel_type = "fused"
        if plan is None and sharders and dist.is_initialized():
            world = dist.get_world_size(group)
            topology = TorchRecTopology(world_size=world, local_world_size=world, compute_device="cpu")
            planner = EmbeddingShardingPlanner(topology=topology, stats=[])
            plan = planner.collective_plan(module, list(sharders), group or dist.group.WORLD)
        return _sharded(module, plan, sharders or (), device=device, group=group)

    @staticmethod
    def _sharded_parameter_names(model: Any) -> list[str]:
        return list(model.fused_optimizer.params)


class _Replicated(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, ReplicatedModel)


class DMPCollection(metaclass=_Replicated):
    """``shardrec.shard(replicas=...)``, with TorchRec's signature."""

    def __new__(  # type: ignore[misc]
        cls,
        module: nn.Module,
        device: Any = None,
        plan: Any = None,
        sharding_group_size: int = 1,
        world_size: int = 1,
        global_pg: Any = None,
        sharders: Sequence[Any] | None = None,
        **other: Any,
    ) -> Any:
        if other.get("custom_all_reduce") is not None or other.get("submodule_configs"):
            raise NoCounterpart("custom_all_reduce and submodule_configs of DMPCollection")
        replicas = shardrec.Replicas(world_size // sharding_group_size)
        return _sharded(module, plan, sharders or (), device=device, group=global_pg, replicas=replicas)


def _reshard(model: Any, sharded_module_fqn: str = "", changed_shard_to_params: Any = None) -> object:
    """TorchRec's ``reshard``, which is given the tables that change."""
    plan = copy.copy(model._plan.plan)
    for path, changed in changed_shard_to_params.items():
        tables = changed[1] if isinstance(changed, tuple) else changed
        plan[path] = type(plan[path])({**plan[path], **tables})
    shapes = {name: (table.num_embeddings, table.embedding_dim) for name, table in model.plan.by_name.items()}
    return model._own_reshard(from_torchrec(TorchRecPlan(plan=plan), model.plan.topology, shapes))


class _Progress:
    """TorchRec's training pipelines, whose options are those of how far to look ahead."""

    def __init__(
        self, model: Any, optimizer: Any, device: Any = None, execute_all_batches: bool = True, **options: Any
    ) -> None:
        if not execute_all_batches:
            raise NoCounterpart("execute_all_batches=False")
        forward = options.get("custom_model_fwd")
        loss = (lambda _, batch: forward(batch)) if forward else None
        self._model, self._pipeline = model, TrainPipeline(model, optimizer, device, loss_fn=loss)
        self.attach()

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def progress(self, iterator: Iterator[Any]) -> Any:
        self.attach()
        return self._pipeline.progress(iterator)

    def detach(self) -> Any:
        _ATTACHED.discard(self._pipeline)
        return self._model

    def attach(self, model: Any = None) -> None:
        """The pipeline changes nothing in its model: only :class:`_Ahead` asks."""
        _ATTACHED.add(self._pipeline)

    @property
    def _pipelined_modules(self) -> list[nn.Module]:
        return [module for module in self._pipeline.modules_ahead if isinstance(module, ShardedCollection)]

    @property
    def _pipelined_postprocs(self) -> list[nn.Module]:
        modules = [module for module in self._pipeline.modules_ahead if not isinstance(module, ShardedCollection)]
        names = {module: name for name, module in self._model.module.named_modules()}
        for module in modules:
            module.fqn = names[module]  # of TorchRec's wrapper
        return modules


_ATTACHED = weakref.WeakSet[TrainPipeline]()


class _Ahead(type):
    """Of ``PipelinedForward`` and ``PipelinedPostproc``, by which TorchRec's pipelines replace what runs ahead.

    An instance is whatever runs ahead in a pipeline that is attached.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        module = getattr(instance, "__self__", instance)  # of a bound forward
        return any(module is each for pipeline in _ATTACHED for each in pipeline.modules_ahead)


class _Evaluation(_Progress):
    def progress(self, iterator: Iterator[Any]) -> Any:
        if getattr(self, "_iterator", None) is not iterator:
            self._iterator, self._outputs = iterator, self._pipeline.predict(iterator)
        return next(self._outputs)[1]


class GradientClippingOptimizer:
    """``shardrec.clip_grad_norm_`` and ``clip_grad_value_``, with TorchRec's constructor.

    The parameters of the optimizer are the dense part of a sharded model.
    """

    def __init__(
        self,
        optimizer: Any,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        **_: Any,
    ) -> None:
        self._optimizer, self._clipping, self._most, self._norm_type = optimizer, clipping, max_gradient, norm_type
        self.last_total_grad_norm: torch.Tensor | None = None
        table = EmbeddingBagConfig(name="table", num_embeddings=2, embedding_dim=4, feature_names=["feature"])
        model = nn.Module()
        model.tables = EmbeddingBagCollection(tables=[table])
        model.dense = nn.ParameterList(optimizer.params.values())
        self._model = shardrec.shard(model)

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def _give_gradients(self) -> None:
        """The tests write the gradients of their tensors, of which the model's parameters are copies."""
        for parameter, given in zip(self._model.module.dense, self._optimizer.params.values(), strict=True):
            parameter.grad = given.grad

    def clip_grad_norm_(self, max_norm: float | None = None) -> torch.Tensor:
        self._give_gradients()
        return shardrec.clip_grad_norm_(self._model, self._most if max_norm is None else max_norm, self._norm_type)

    def step(self) -> None:
        is_norm = self._clipping is GradientClipping.NORM
        self.last_total_grad_norm = self.clip_grad_norm_(None if is_norm else float("inf"))
        if self._clipping is GradientClipping.VALUE:
            shardrec.clip_grad_value_(self._model, self._most)
        self._optimizer.step(None)


PIPELINES = (
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
    "PrefetchTrainPipelineSparseDist",
)
LEFT_OUT = (
    "DataLoadingThread",
    "EvalPipelineFusedSparseDist",
    "PipelineStage",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDistCompAutograd",
)


def _left_out(name: str) -> type:
    def refuse(*_: Any, **__: Any) -> None:
        raise NoCounterpart(name)

    return type(name, (), {"__init__": refuse, "__class_getitem__": classmethod(lambda cls, _: cls)})


NAMES: dict[str, Any] = {
    **{name: type(name, (_Progress,), {}) for name in PIPELINES},
    **{name: _left_out(name) for name in LEFT_OUT},
    **{name: _Ahead(name, (), {}) for name in ("PipelinedForward", "PipelinedPostproc")},
    "EvalPipelineSparseDist": _Evaluation,
    "DMPCollection": DMPCollection,
    "DistributedModelParallel": DistributedModelParallel,
    "GradientClippingOptimizer": GradientClippingOptimizer,
    "ShardedEmbeddingBagCollection": shardrec.modules.ShardedEmbeddingBagCollection,
}


def put_into(module: ModuleType) -> None:
    """Have a module of TorchRec's tests use shardrec."""
    for name, counterpart in NAMES.items():
        if hasattr(module, name):
            setattr(module, name, counterpart)


def put_into_models() -> None:
    """Have sharded models answer to a few names of TorchRec's."""
    model: Any = shardrec.ShardedModel
    fused = model.fused_optimizer

    def fused_optimizer(self: Any) -> Any:
        try:
            optimizer = fused.fget(self)
        except ConfigError:  # TorchRec's is empty
            return CombinedOptimizer([])
        optimizer.save_param_groups(False)  # as TorchRec's by default
        return optimizer

    def reshard(self: Any, *args: Any, **kwargs: Any) -> object:
        return (_reshard if "changed_shard_to_params" in kwargs else model._own_reshard)(self, *args, **kwargs)

    model.fused_optimizer = property(fused_optimizer)
    model._own_reshard, model.reshard = model.reshard, reshard
    model.init_data_parallel = lambda self: None
    replicated: Any = ReplicatedModel
    replicated.sync = replicated.sync_replicas
