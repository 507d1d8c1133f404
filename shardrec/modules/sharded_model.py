"""A whole model with its collections sharded, and the gradients of its dense part averaged.

[Note: what torch.compile compiles]
``torch.compile(model)`` compiles the functions that run inside it. Those of :class:`ShardedModel` around the user's
model are excluded, so that the user's forward is compiled, and a fault in it, including one of the compiler, still
reaches the other ranks. The first of them, ``forward``, is only skipped (``recursive=False``). The functions that it
calls are disabled. The user's model in between is not.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.fx import Proxy

from shardrec._dynamo import passed_over, refuse_export
from shardrec._late_imports import late_import
from shardrec.errors import ConfigError, InputError
from shardrec.exchange.agree import Ranks, all_gather, by_rank, ranks_of
from shardrec.exchange.headers import quoted
from shardrec.ids.maps import collective_stats, cut_faults
from shardrec.layout import ShardingPlan
from shardrec.lookup.deferred import DeferredGradients
from shardrec.modules.annotate import annotate_for_dynamo
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.dense import DenseOptions, DenseReducer, DenseWrap, average_dense, dense_options
from shardrec.modules.forward import COMPILED, EAGER, dense_signature
from shardrec.modules.fsdp import cut_whole_values, let_go_of_whole_parameters
from shardrec.modules.fx_calls import recorded_call
from shardrec.modules.grad_scaler import watch_scalers
from shardrec.modules.in_backward import copy_in_backward, dense_in_backward, has_gradient_hooks, steps_in_backward
from shardrec.modules.inventory import Item, items
from shardrec.modules.inventory import copied as copied_collection
from shardrec.modules.optim import FusedOptimizers
from shardrec.modules.overrides import copy_hooks
from shardrec.modules.shard_gradient import mark_gradients
from shardrec.modules.table import ShardedTable, StateDictError
from shardrec.step.context import ModelContext

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from shardrec.planner.replanning import Replanned


class ShardedModel(nn.Module):
    """The result of :func:`shardrec.shard`. It has the attributes, state_dict keys and parameter names of its model.

    Args:
        module: the model, its collections already sharded.
        plan: the layouts of the tables.
        context: shared by the sharded collections.
        group: the process group. None on one rank.
        dense: how the dense part's gradients are averaged.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: ShardingPlan,
        context: ModelContext,
        group: dist.ProcessGroup | None,
        *,
        dense: DenseWrap | DenseOptions = "ddp",
    ) -> None:
        super().__init__()
        self.training = module.training
        self.module = module
        self.plan = plan
        self.group = group
        self.context = context
        self._sharded = [child for child in module.modules() if isinstance(child, ShardedCollection)]
        self.made_fused_optimizer: FusedOptimizers | None = None
        self._has_warned = False
        self._hooked = -1, False  # number of parameters with hooks at the last look for this model's, and the result
        self.tables_without_room: set[str] = set()  # a reshard has warned of them
        self._dense = dense
        self._reducer: DenseReducer | None = None
        watch_scalers(self)
        if group is not None:
            self._mark_gradients()
            self._reducer = average_dense(module, dense, group, context)
            context.gradients.reducer, context.gradients.are_reduced = self._reducer, True

    def _mark_gradients(self) -> None:
        """Have the gradients of cut tables refuse a norm of their own."""
        for table in (table for collection in self._sharded for table in collection.tables().values()):
            mark_gradients(() if table.layout.replicated else table.parameters())

    @passed_over  # see [Note: what torch.compile compiles]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward.

        Raises:
            InputError: on every rank at the same step, if the input of any rank is faulty; on the other ranks, if the
                model's own code fails on a rank before its last sharded collection is called.
            PeerError: if another rank is gone or did not answer within the process group's timeout.
        """
        if torch.compiler.is_exporting():
            refuse_export(self)
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Proxy):
                return recorded_call(self, args, kwargs)
        # What is compiled must not look into the functions around it. Where nothing is, their wrappers are not needed.
        is_compiled = callable(get_eval_frame_callback())
        begin, before, end = COMPILED if is_compiled else EAGER
        forward = begin(self, args, kwargs)
        try:
            if self._reducer is not None or self.context.step.ahead is not None:
                before(self)
            output = self._modules["module"](*args, **kwargs)  # type: ignore[misc]
        except BaseException as error:
            end(forward, error)
            raise
        return end(forward, None, output)

    @property
    def fused_optimizer(self) -> FusedOptimizers:
        """The tables' fused optimizers as one torch optimizer, for learning-rate schedules and states.

        Raises:
            NoFusedOptimizer: if no table has a fused optimizer. A ConfigError and an AttributeError.
        """
        if self.made_fused_optimizer is None:
            self.made_fused_optimizer = FusedOptimizers(self._sharded, self._table_names(), self.context)
        return self.made_fused_optimizer

    def named_tables(self) -> dict[str, ShardedTable]:
        """The tables of all collections by the paths of their modules."""
        return {path: child for path, child in self.module.named_modules() if isinstance(child, ShardedTable)}

    def _table_names(self) -> dict[int, str]:
        return {id(table): path for path, table in self.named_tables().items()}

    @property
    def ranks(self) -> Ranks:
        """The ranks that hold the model: with replicas, all of their ranks that belong to one process group."""
        return ranks_of(self.group, self.context.device)

    @property
    def sharded_collections(self) -> Sequence[ShardedCollection]:
        """The model's collections, in its order."""
        return self._sharded

    @property
    def is_traced(self) -> bool:
        """Whether a collection's operators are part of a compiled graph; else each collection is a graph break."""
        return any(collection._traced is not None for collection in self._sharded)

    @property
    def has_fused_tables(self) -> bool:
        """Whether a table has an optimizer of its own. Equal on every rank."""
        return any(collection.fused_optimizers() for collection in self._sharded)

    def update_in_backward(self) -> str:
        """What each backward updates with the gradients as they are, with the remedy; "" if optimizers' steps do."""
        if self.has_fused_tables and not self.context.options.updates_at_step:
            return "its tables are updated in each backward: shard it with shardrec.shard(..., update='step')"
        stepped = list(dense_in_backward(self))
        remedy = "give them to an ordinary optimizer instead of apply_optimizer_in_backward"
        return f"the optimizers of {', '.join(stepped[:3])} step in each backward: {remedy}" if stepped else ""

    @property
    def updates_above_lookups(self) -> bool:
        """Whether a backward may update a parameter before it reaches the lookups: an optimizer in backward of a dense
        one, or another hook on its gradient. True also where the model has parts on other ranks, servers or replicas.

        Hooks count that are there in the first forward, and optimizers in backward whenever they are given.
        """
        count = steps_in_backward()
        if count != self._hooked[0]:
            self._hooked = count, not self._is_plain or has_gradient_hooks(self.module)
        return self._hooked[1]

    def scaler_fault(self) -> str:
        """Why a GradScaler cannot scale this model's gradients; "" if it can."""
        return self.update_in_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, also of rows (``update="step"``)."""
        super().zero_grad(set_to_none)
        for collection in self._sharded:
            collection.drop_gradients()

    def deferred_gradients(self) -> list[DeferredGradients]:
        """The gradients of this rank's rows that ``fused_optimizer.step()`` will take."""
        return [part for collection in self._sharded for part in collection.shards.deferred()]

    def warn_without_step(self) -> None:
        """Warn, once, that a backward has left gradients, and that an optimizer to apply them is missing."""
        if not self._has_warned and any(part.backwards for part in self.deferred_gradients()):
            self._has_warned = True
            warnings.warn(
                "this model's tables are updated by model.fused_optimizer.step(), which has not been called since a "
                "backward: call it beside the other optimizers' step()",
                stacklevel=2,
            )

    def dense_parameters(self) -> Iterator[nn.Parameter]:
        """The parameters that an ordinary optimizer trains: all but those which an optimizer in backward updates.

        For ``torch.optim.Adam(model.dense_parameters())``: the dense part, and tables without an optimizer in backward.
        """
        return (parameter for parameter in self.parameters() if not hasattr(parameter, "_in_backward_optimizers"))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the dense part's gradients without averaging them, as DistributedDataParallel.no_sync does.

        Counts for the backward of each forward made inside. With ``update="backward"``, sharded tables with a fused
        optimizer are still updated in each backward. Replicated ones accumulate with the dense part. On one rank there
        is nothing to average: optimizers in backward of the dense part step in each backward.
        """
        gradients = self.context.gradients
        before, gradients.accumulates = gradients.accumulates, True
        try:
            yield
        finally:
            gradients.accumulates = before

    @torch.inference_mode(False)  # an inference tensor could not be written later
    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        """A separate model with the same plan: tables, fused optimizers' states and settings, and the dense part.

        For averages of weights, such as ``torch.optim.swa_utils.AveragedModel``. Every rank calls it.

        Raises:
            ConfigError: for a model with servers, replicas or FSDP2, which this process cannot copy.
        """
        if not self._is_plain:
            raise ConfigError(
                f"this {type(self).__name__} cannot be copied: tables on servers, replicas, FSDP2 and served tables "
                "have parts that are not its own. Shard another model and load this one's state_dict into it"
            )
        context = ModelContext(self.context.collectives, self.context.device, self.context.options)
        for collection in self._sharded:  # which deepcopy finds in its memo
            memo[id(collection)] = copied_collection(collection, context, collection.storage)
            for name, table in collection.tables().items():
                targets = memo[id(collection)].tables()[name].locals
                memo |= {id(parameter): targets[shard] for shard, parameter in table.locals.items()}
        module = copy.deepcopy(self.module, memo)
        for parameter in self.parameters():
            copy_in_backward(parameter, memo[id(parameter)])
        annotate_for_dynamo(module)
        copied = ShardedModel(module, self.plan, context, self.group, dense=self._dense)
        copied.training = self.training  # and not train(), which would set the modes of the model's modules
        copied.made_fused_optimizer = None if self.made_fused_optimizer is None else copied.fused_optimizer
        for target, source in zip(copied.inventory(), self.inventory(), strict=True):
            target.set(copy.deepcopy(source.get()))
        for original in (self, *self._sharded):
            copy_hooks(original, copied if original is self else memo[id(original)], memo)
        return copied

    @property
    def _is_plain(self) -> bool:
        """Whether each rank has its shards of one copy of the tables, and all of the dense part."""
        fsdp = dense_options(self._dense)[0] == "fsdp" and self.group is not None
        return type(self) is ShardedModel and not self.servers and not fsdp

    def reshard(self, plan: ShardingPlan, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Change the plan during training: move the parts that lie elsewhere under the new plan, and nothing else.

        Every rank calls it with the same plan, after the optimizers' steps and before the next forward. Rows move with
        their optimizer states and dynamic ids, over collectives. Afterwards training continues as from a checkpoint
        that was loaded under the new plan, bit-identically, with the same model, ``fused_optimizer``,
        ``TrainPipeline``, live scripts and compiled programs. Parameters of tables that have moved are new ones. The
        old ones are empty.

        A rank holds, besides its shards, the new shards per lookup group that changes on it, and at most 64 MiB of
        values on their way.

        Args:
            plan: for the same tables and ranks.
            optimizer: the ordinary optimizer that trains tables without an optimizer of their own, if any of these
                moves: its groups get the new parameters, and its states move with them.

        Returns:
            Bytes that this rank has received of other ranks' tables, states and ids.

        Raises:
            PlanError: on every rank, if the plan does not fit the tables or ranks, or differs between ranks.
            ConfigError: on every rank, if lookups or gradients of before are unused, or ``optimizer`` is needed; for a
                model with embedding servers, replicas or FSDP2.
            CheckpointError: on every rank, if one fails, for want of memory for example.
            PeerError: if another rank is gone. After each of these errors the model has its old plan and values.
        """
        self._check_plan_may_change()
        moved: int = late_import("reshard_model")(self, plan, optimizer)
        return moved

    def replan(
        self,
        sample_batches: Iterable[KeyedJaggedTensor],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        steps: float = 10_000,
        min_gain: float = 0.05,
        **planning: Any,
    ) -> Replanned | None:
        """Plan again for the ids that training sees now, and :meth:`reshard` if that pays.

        The cost model prices the present plan and others with the ids of the batches. The plan changes if a step is
        predicted to be shorter by ``min_gain``, and ``steps`` steps win more than the move takes. Every rank calls it
        after the same step. The first rank plans for all.

        Args:
            sample_batches: of this rank: what the collections were called with in the last few steps. A few thousand
                samples are enough. Ids per sample are means over the ranks. How often ids repeat, and which rows they
                hit, is taken from the first rank.
            optimizer: as for ``reshard``.
            steps: in which a move has to pay for itself, such as those to the next call.
            min_gain: least part of the predicted time of a step, without the dense part, that has to be won.
            planning: ``constraints``, ``profile`` and ``limits`` (default: 10 seconds) as for :func:`shardrec.plan`.

        Returns:
            The moved bytes and the predicted gain, as a line with ``str``. None if the plan stays.

        Raises:
            ConfigError: on every rank, if a rank lacks samples, if a number is not above 0, or as ``reshard``.
            CheckpointError: on every rank, if planning fails, or as ``reshard``.
            PeerError: if another rank is gone. After each of these errors the model has its old plan and values.
        """
        self._check_plan_may_change()
        options = {"steps": steps, "min_gain": min_gain, **planning}
        replanned: Replanned | None = late_import("replan_model")(self, sample_batches, optimizer, **options)
        return replanned

    def _check_plan_may_change(self) -> None:
        if not self._is_plain:
            raise ConfigError(
                f"this {type(self).__name__} cannot be given another plan: tables on servers, replicas, FSDP2 and "
                "served tables have parts that do not move. Save a checkpoint, shard the model again, and load it"
            )

    def follow_plan(self, plan: ShardingPlan) -> None:
        """The collections have the shards of another plan: all that knows their parameters follows."""
        self.plan = plan
        for collection in self._sharded:
            collection.plan = plan
        self.context.step.replan()
        if self.group is not None:
            self._mark_gradients()
        if self._reducer is not None:
            self._reducer.arm()
        if self.made_fused_optimizer is not None:
            self.made_fused_optimizer.follow(self._table_names())

    def inventory(self) -> list[Item]:
        """What the model holds besides the values of tables' rows (:mod:`shardrec.modules.inventory`)."""
        return list(items(self.module, self._sharded, self.made_fused_optimizer))

    servers = 0
    """Number of servers that hold the tables (:mod:`shardrec.rpc`)."""

    def save_servers(self, data: Path, first: int) -> list[Any]:
        """Have the servers write their shards into a checkpoint's data folder, as files from number ``first`` on.

        Every rank calls it. The first one gets what was written.
        """
        raise AssertionError("this model has no servers")

    def load_servers(self, folder: Path) -> None:
        """Have the servers load their shards from a checkpoint. Every rank calls it."""
        raise AssertionError("this model has no servers")

    def bad_ids(self) -> dict[str, int]:
        """The number of ids outside their table in this rank's batches since the model was sharded, by feature; of a
        feature that several collections look up, by the collection's path and the feature, such as
        ``"sparse.user_bags.country"``. It has the features with policy ``"zero"`` or ``"wrap"`` (``on_bad_id`` of
        :func:`shardrec.shard`). Ids are counted on the device. This method waits for it. A batch that raises an error
        counts only in collections that were looked up before it.
        """
        paths = {child: path for path, child in self.module.named_modules()}
        counts = [(paths[child], *counted) for child in self._sharded for counted in child.bad_ids().items()]
        times = Counter(feature for _, feature, _ in counts)
        return {f"{path}.{feature}" if times[feature] > 1 else feature: count for path, feature, count in counts}

    def id_stats(self) -> dict[str, dict[str, int]]:
        """Statistics of ids per table with dynamic ids, by its name in the plan. Every rank calls it. Of
        lookups in training mode since the model was sharded: ``lookups``, ids received by the rows' owners (for a
        sequence collection with ``dedup``, distinct ids); ``hits``, ids that had a row before; ``inserts`` and
        ``evictions`` of ids; ``fallbacks``, lookups of ids without a row; ``no_room``, how often an id was due a row
        and none could be freed (inserts and ``no_room`` are the admissions); ``collisions``, ids of a step that shared
        a fallback row with an earlier one. Current values: ``rows`` that ids may have, and ``used``, the number of rows
        with an id. Makes one collective.
        """
        maps = [collection.id_maps for collection in self._sharded if collection.id_maps is not None]
        return collective_stats(maps, self.context.collectives, self.context.device)

    def set_id_capacity(self, table: str, capacity: int) -> None:
        """Allow the ids of a table to have more of its rows from now on. Every rank calls it, with the same arguments.
        To add rows to a table, load a checkpoint into a model with a larger ``num_embeddings``.

        Args:
            table: name in the plan of a table with dynamic ids.
            capacity: rows that ids may have, as in :class:`shardrec.DynamicIds`.

        Raises:
            ConfigError: for a table without dynamic ids, a capacity that is lower than before or more than the
                table's rows, or arguments that differ between ranks.
        """
        given = all_gather(f"table {table!r}, capacity {capacity}", self.ranks, "capacity of a table")
        if len(set(given)) > 1:
            lines = "\n  ".join(by_rank(given))
            raise ConfigError(f"the ranks give different arguments. Give all of them the same:\n  {lines}")
        options_of = self.context.options.dynamic_ids
        old = options_of.get(table)
        if old is None:
            known = ", ".join(map(repr, options_of)) or "none"
            raise ConfigError(f"table {table!r} lacks dynamic ids. The tables that have them are {known}")
        layout, options = self.plan.by_name[table], dataclasses.replace(old, capacity=capacity)
        fault = cut_faults(layout, options)
        if fault or capacity < (old.capacity or layout.num_embeddings):
            raise ConfigError(fault or f"table {table!r} has capacity {old.capacity or 'for all rows'}. Give more")
        self.context.options = dataclasses.replace(self.context.options, dynamic_ids={**options_of, table: options})
        for collection in self._sharded:
            if collection.id_maps is not None and table in collection.id_maps.options:
                collection.id_maps.set_options(layout, options)

    def fail(self, error: Exception, inputs: object) -> None:
        """Tell the other ranks of an error of this forward, if they still make a header exchange in this step. They
        raise an InputError that quotes it.

        Args:
            error: of the model's own code. Gets a note of the likely cause, if there is one.
            inputs: of the forward, which may be the cause.

        Raises:
            InputError: on this rank too, if ``error`` stopped the tracing of an invalid batch.
        """
        context = self.context
        cause = self._dtype_fault(dense_signature(inputs)) if type(error) is RuntimeError else ""
        if cause:
            error.add_note(cause)
        refusal = context.forward_state.refusal
        text = refusal or f"the model's forward failed: {quoted(error)}"
        if context.collectives.world_size > 1 and context.step.others_wait:
            context.failures_told += 1
            try:
                context.headers.fail_all(text)
            except InputError as shared:
                if refusal:
                    raise shared from error
        else:
            context.collectives.report_failure(f"raised in forward: {quoted(error)}")
        if refusal:
            raise InputError(f"rank {context.collectives.rank}: {text}") from error

    def _dtype_fault(self, signature: str) -> str:
        tables = {id(p) for collection in self._sharded for p in collection.parameters()}
        dense = {p.dtype for p in self.module.parameters() if p.is_floating_point() and id(p) not in tables}
        expected = {str(dtype).removeprefix("torch.") for dtype in dense}
        names = signature.split(" and ")
        input_dtypes = {name.rsplit(" ", 1)[-1] for name in names if "float" in name}
        wrong = input_dtypes - expected
        if not wrong or not expected or torch.is_autocast_enabled():
            return ""
        return (
            f"among the other inputs are {', '.join(sorted(wrong))} tensors and the model's parameters are "
            f"{', '.join(sorted(expected))}: convert the inputs with .to(torch.{min(expected)})"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            attribute = inspect.getattr_static(type(self), name, None)
            if isinstance(attribute, property):  # whose AttributeError says more than the model's would
                return attribute.__get__(self)
            return getattr(super().__getattr__("module"), name)

    def scripted_twin(self) -> nn.Module:
        """The module that TorchScript uses instead of this one: the model that it holds.

        Its parameters are this model's, so that their gradients are averaged as in eager mode.
        """
        return self.module

    def __prepare_scriptable__(self) -> nn.Module:
        """The module that ``torch.jit.script(model)`` compiles: the copy that ``shardrec.script`` makes, with waits at
        the calls.

        Raises:
            ScriptError: if this model is inside of another one that is being scripted.
        """
        from shardrec.scripting.prepare import prepared  # 0.03 s of imports, which training does not need

        return prepared(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        for collection in self._sharded:  # which refuses, before anything else has changed
            collection._apply(fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def _fqn_modifiers(self) -> dict[str, str]:
        """For ``torch.distributed.checkpoint.state_dict``: the names of parameters do not begin with ``module``."""
        return {"": "module"}

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The model's state_dict, with the unsharded model's keys. Cut tables are ShardedTensors on several ranks."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, *, prefix: str = ""
    ) -> Any:
        """Load a state_dict of this model, or of the unsharded one.

        Args:
            state_dict: values by key.
            strict: whether missing and unexpected keys are errors.
            assign: whether the dense part takes the tensors themselves, as of an unsharded model.
            prefix: what this model's keys begin with, as in ``state_dict(prefix=...)``; other keys are ignored.

        Raises:
            RuntimeError: as of an unsharded model. Before anything changes, also a ConfigError for tables of another
                shape, dtype or cut.
        """
        if prefix:
            values = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
            return self.load_state_dict(values, strict, assign)
        tables = [(f"{path}.weight", table) for path, table in self.named_tables().items()]
        # torch's set_model_state_dict adds this rank's parameters.
        shards = {key.removesuffix("weight") + name for key, table in tables for name in table._parameters}
        values = cast(dict[str, Any], copy.copy(state_dict))  # with torch's _metadata
        for key in shards.difference(key for key, _ in tables).intersection(values):
            del values[key]
        faults = ((key, table.value_fault(values[key])) for key, table in tables if key in values)
        if texts := [f"{key}: {fault}" for key, fault in faults if fault]:
            raise StateDictError("nothing was loaded: " + "; ".join(texts))
        let_go_of_whole_parameters(self)
        cut_whole_values(values, self)
        return self.module.load_state_dict(values, strict=strict, assign=assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        # Of a module around this one. Its own state_dict has the keys of :meth:`state_dict`.
        for key in [key for key in state_dict if key.startswith(prefix)]:
            state_dict[f"{prefix}module.{key.removeprefix(prefix)}"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters under its own names: this rank's shards, then the dense ones."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The model's buffers under its own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def require_sharded(model: nn.Module, taker: str) -> None:
    """Raise unless a model was returned by :func:`shardrec.shard`.

    Args:
        model: the argument of ``taker``.
        taker: name of the function that takes a sharded model, for the error.

    Raises:
        ConfigError: if it was not. Names the sharded model inside if ``model`` is a wrapper around one.
    """
    if isinstance(model, ShardedModel):
        return
    name = type(model).__name__
    held = next((path for path, child in model.named_modules() if isinstance(child, ShardedModel)), None)
    if held is not None:
        raise ConfigError(
            f"{taker} takes the sharded model itself, which {name} holds as {held!r}: give it that one, or put the "
            "wrapper around the model before shardrec.shard"
        )
    raise ConfigError(
        f"{taker} takes the result of shardrec.shard, not {name}: shard the model first, which takes no process "
        "group on one rank"
    )
