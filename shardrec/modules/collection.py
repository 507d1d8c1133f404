"""The base of the sharded collections: tables, parameters, fused optimizer states."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Proxy
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec._dynamo import left_alone
from shardrec.errors import ConfigError, PlanError
from shardrec.exchange.batch import NO_LIMIT, Expectation
from shardrec.exchange.dedup import DistinctIds
from shardrec.exchange.recomputation import IN_PIPELINE
from shardrec.exchange.route import Lookup, Route, build_route
from shardrec.exchange.to_device import moved
from shardrec.exchange.transport import transport_of
from shardrec.ids.maps import IdMaps, cut_faults
from shardrec.layout import Shard, ShardingPlan, TableLayout
from shardrec.layout.discover import Collection, configs_of
from shardrec.lookup.groups import LookupGroup, LookupTable, group_tables
from shardrec.lookup.optimizers import FusedOptimizer
from shardrec.lookup.replicated import ReplicatedLookup
from shardrec.lookup.row_optimizers import RowOptimizer
from shardrec.lookup.shards import ShardLookup
from shardrec.modules.compiled_outputs import Deferred, DeferredKeyedTensor
from shardrec.modules.fx_calls import recorded_call
from shardrec.modules.given_tables import GivenTables, given_tables
from shardrec.modules.initial import TableDraw, check_init_fn, draw_rows, first_values
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable, TableWatch, load_table, settle
from shardrec.pending import LazyAwaitable
from shardrec.planner.describe import PlannedTable
from shardrec.step.begin import begin
from shardrec.step.context import ModelContext
from shardrec.step.input_plan import InputPlan
from shardrec.step.pooled_columns import PooledOutput
from shardrec.step.records import GradMode, InFlight, StepPlan
from shardrec.step.sequence_rows import SequenceOutput

Values: TypeAlias = Tensor | TableDraw | Mapping[Shard | None, Tensor] | None
"""A table's values: (num_embeddings, embedding_dim), how to draw them, or the values per shard of this rank, the
replica under None. None to leave them as they are."""


class ShardedCollection(nn.Module, abc.ABC):
    """Base of the sharded collections.

    A table's weights have the dtype of its config's ``data_type``: FP32, FP16 or BF16 (TorchRec's unsharded module
    makes an FP16 parameter for either 16-bit type). With each dtype, rows are summed in float32 and travel as float32
    (or as ``QuantizedComms`` says), and fused optimizers compute and keep their states in float32. An updated row of a
    16-bit table is rounded to nearest.

    Args: as for :class:`ShardedEmbeddingBagCollection`, for a collection of either kind.
    """

    input: InputPlan
    step_plan: StepPlan
    shards: ShardLookup
    replicas: ReplicatedLookup | None
    _replicated: list[LookupTable]
    id_maps: IdMaps | None = None
    lookups: tuple[Lookup, ...]
    _configs: list[Any]
    _holder: ClassVar[str]
    """The attribute that has the tables, as the unsharded module calls it."""

    _by_width: ClassVar[bool] = False
    """Whether shards of different widths are in different lookup groups."""

    _traced: Any = None
    """The twin with the ``traced`` that a tracer runs instead of forward. None for a graph break: see annotate.py."""

    def __init__(
        self,
        module: Collection | ShardedCollection,
        plan: ShardingPlan,
        *,
        path: str = "",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        context: ModelContext | None = None,
        storage: Storage | None = None,
    ) -> None:
        super().__init__()
        sharded = module if isinstance(module, ShardedCollection) else None
        self._configs = configs = configs_of(module) if sharded is None else sharded._configs
        self.plan = plan
        self.storage = storage or Storage()
        self.portable = self.storage.portable
        self.device = torch.device(device or "cpu")
        self.context = context or ModelContext(transport_of(group, self.device), self.device)
        self.group = (group or dist.group.WORLD) if self.context.collectives.world_size > 1 else None
        self._ranks_per_host = plan.topology.ranks_per_host
        self._config_of = {config.name: config for config in configs}
        self._given: GivenTables = (
            given_tables(getattr(module, self._holder), configs, plan, path, self._is_at_step)
            if sharded is None
            else sharded._given
        )
        self._lookup_tables = self._given.lookup_tables
        self.frozen = self._given.frozen if self.storage.trains else set(self._lookup_tables)
        self._optimizers = {
            name: table.optimizer
            for name, table in self._lookup_tables.items()
            if table.optimizer is not None and self.storage.trains
        }
        self.portable_programs: WeakSet[Any] = WeakSet()  # which read the tables' memory
        self.averages = 0.0  # the decay of averages of rows. 0: none are kept
        self._number_tables()
        self._read(module)
        for config in configs:
            if self._is_dynamic(self.table_layouts[config.name]):
                check_init_fn(config)
        self._build_lookups()
        if sharded is None:
            setattr(self, self._holder, self._build_parameters(first_values(module)))
            return
        setattr(self, self._holder, self._build_parameters((name, None) for name in sharded.tables()))  # to be written

    def _number_tables(self) -> None:
        self.table_layouts = {name: table.layout for name, table in self._lookup_tables.items()}
        self.replica_number = {table.layout.name: index for index, table in enumerate(self._replicated_tables())}

    @abc.abstractmethod
    def _read(self, module: Any) -> None:
        """Keep what the lookups need of the collection that this one is made of, beside its tables."""

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the output's values: float32, or the ``output_dtype`` given to :func:`shardrec.shard`."""
        return self.context.options.output_dtype

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Look up the local batch.

        Args:
            features: the batch of this rank: int32 or int64 ids of the tables' features, in any order. Further keys
                are ignored. Batch sizes may differ between ranks and may be 0.

        Returns:
            Lazily awaited: what the unsharded module returns, a KeyedTensor of (B, D) or a dict of JaggedTensors of
            (N_f, D), float32 unless ``shardrec.shard`` was given another dtype.

        Raises:
            InputError: on every rank at the same step, if the batch of any is faulty.
            PeerError: if another rank is gone.
        """
        if torch.compiler.is_compiling():
            value: LazyAwaitable[Any] = self._compiled(features)
            return value
        if isinstance(features, Proxy):
            return recorded_call(self, (features,), {})  # type: ignore[return-value]
        if self.storage.trains or not torch.is_grad_enabled():
            return self._pending(self.call(features))
        with torch.no_grad():
            return self._pending(self.call(features))

    def call(self, features: Any, *, by_operator: bool = False, scripted: bool = False) -> InFlight:
        """Look up a batch. The exchange may wait for other calls. A call that was made ahead of this forward with these
        features, in these modes, is used instead of a new one (:mod:`shardrec.step.calls_ahead`).

        Args:
            features: as :meth:`forward` takes them.
            by_operator: whether an operator calls (:mod:`shardrec.modules.operators`). Its backward differs.
            scripted: whether the operator is called by TorchScript.

        Raises:
            ConfigError: inside ``torch.jit.trace``; if another thread is in the model's forward, or calls another of
                its modules; if the module's tables were changed since the call was made ahead.
            InputError: as :meth:`forward`.
            PeerError: as :meth:`forward`.
        """
        if torch._C._is_tracing():  # type: ignore[no-untyped-call,unused-ignore]
            raise ConfigError(
                "torch.jit.trace records the sizes of one batch, and no collective: script the model with "
                "shardrec.script(model), or export it with shardrec.export"
            )
        step = self.context.step
        step.enter(waits=scripted)
        try:
            if step.observed is not None:
                step.observed.append((self, features, GradMode.current()))
            call = None
            if step.ahead is not None:
                call = step.ahead.take(self, features, assigns_new_ids=self.assigns_new_ids())
            if call is None:
                call = self.begin(features)
            elif fault := self.fault():  # since the call was made ahead
                raise ConfigError(fault)
            call.by_operator = by_operator
            step.join(call, self, scripted=scripted)
        finally:
            step.lock.release()
        return call

    def begin(self, features: Any) -> InFlight:
        """A call before its ids are under way."""
        plan = self.step_plan
        agreement = self._agreement() if plan.input.world_size > 1 else ""
        assigns = plan.id_maps is not None and self.assigns_new_ids()
        return begin(plan.input, features, agreement, self._watch.fault(), plan=plan, assigns_new_ids=assigns)

    @abc.abstractmethod
    def _pending(self, call: InFlight) -> LazyAwaitable[Any]:
        """The output of a call."""

    def tables(self) -> Mapping[str, ShardedTable]:
        """The sharded tables, by their own names."""
        return dict(getattr(self, self._holder).items())

    @abc.abstractmethod
    def scripted_twin(self) -> nn.Module:
        """The module that TorchScript in this process, and a tracer, use instead of this one."""

    def bad_ids(self) -> dict[str, int]:
        """See :meth:`shardrec.ShardedModel.bad_ids`."""
        numbers = dict(zip(self.input.expect.features, self.input.bad_ids.tolist(), strict=True))
        return {feature: numbers[feature] for feature in self.input.expect.on_bad_id}

    def _compiled(self, features: Any) -> Any:
        """forward, as a tracer sees it."""
        if self._traced is None:
            return self._look_up_outside(features)
        return self._traced.traced(features)

    @left_alone
    def _look_up_outside(self, features: Any) -> Any:
        """An eager lookup with a value for compiled code: a KeyedTensor, or a dict of JaggedTensors."""
        pending = self(features)
        columns = self.deferred_columns()
        return pending.wait() if columns is None else DeferredKeyedTensor(Deferred(_waited, pending), *columns)

    def __prepare_scriptable__(self) -> nn.Module:
        from shardrec.scripting.prepare import refuse  # 0.03 s of imports, which training does not need

        refuse(self)

    def deferred_columns(self) -> tuple[list[str], list[int]] | None:
        """Keys and columns of an output that compiled code can have before its values. None for another output."""
        return None

    def _replicated_tables(self) -> list[LookupTable]:
        """The tables with a replica on every rank."""
        return [table for table in self._lookup_tables.values() if table.layout.replicated]

    @property
    def has_trainable_shards(self) -> bool:
        """Whether any cut table is trained; if not, no gradients are sent."""
        return any(not layout.replicated and name not in self.frozen for name, layout in self.table_layouts.items())

    def _agreement(self) -> str:
        """What the ranks must have in common in this step, beyond the ids' dtype."""
        dense = self.context.forward_state.dense_signature
        learning = "" if self.id_maps is None else f", dynamic ids {'learned' if self.assigns_new_ids() else 'frozen'}"
        frozen = "" if self.step_plan.trains_shards else ", tables frozen"
        parts = IN_PIPELINE.micro_batches
        cut = f", {parts} micro-batches (the least of chunks and samples)" if parts else ""
        others = f", other inputs {dense}" if dense else ""
        return self.context.gradients.agreement() + frozen + learning + cut + others

    def fault(self) -> str:
        """What was done to a table since it was sharded that its lookups cannot follow; "" for nothing."""
        return self._watch.fault()

    def _is_dynamic(self, layout: TableLayout) -> bool:
        return layout.name in self.context.options.dynamic_ids

    def assigns_new_ids(self) -> bool:
        """Whether a lookup in training gives rows to new ids. One that a backward computes again never does."""
        return self.id_maps is not None and self.training and self.storage.trains

    @torch.no_grad()
    def renew_rows(self, shard: Shard, rows: Tensor, step: int) -> None:
        """Draw new values for rows of a shard like its table's initial values, and reset their fused optimizer states.

        Args:
            shard: of this rank.
            rows: (E,) int64.
            step: part of the seed, so that the values differ from other steps' values.
        """
        (name,) = (name for name, layout in self.table_layouts.items() if layout.name == shard.table)
        self.shards.settle([shard], to_write=True)
        weight, optimizer = self.shards.weight(shard), self._optimizers.get(name)
        drawn, rows = draw_rows(self._config_of[name], shard, rows.numel(), step), moved(rows, weight.device)
        weight.index_copy_(0, rows, moved(drawn.to(weight.dtype), weight.device))
        if optimizer is not None:
            self.shards.drop_rows(shard, rows)
            for state_name, state in self.shards.states(shard).items():
                first = optimizer.initial_accumulator_value if state_name in optimizer.states else 0
                state.index_fill_(0, rows, first)

    @abc.abstractmethod
    def _build_lookups(self) -> None:
        """Make the lookups and the exchanges of ids and rows, from configs, layouts and context."""

    def _make_lookups(self, groups: Sequence[LookupGroup], names: Iterable[str]) -> list[Lookup]:
        """A lookup per feature, table after table. ``names`` are the keys of the output."""
        lookups, outputs = list[Lookup](), iter(names)
        for config in self._configs:
            layout = self.table_layouts[config.name]
            of_table = [(group.width, index) for index, group in enumerate(groups) if layout in group.layouts]
            lookups += (
                Lookup(
                    feature=feature,
                    layout=layout,
                    group=max((index for _, index in of_table), default=0),
                    output=next(outputs),
                    mean=getattr(config, "pooling", None) is PoolingType.MEAN,
                    dynamic=self._is_dynamic(layout),
                    width_groups=tuple((width, index) for width, index in of_table if width is not None),
                )
                for feature in config.feature_names
            )
        return lookups

    def _make(
        self,
        groups: Sequence[LookupGroup],
        lookups: Sequence[Lookup],
        sent: Sequence[Lookup],
        *,
        weighted: bool,
        pooled: bool,
        distinct: DistinctIds | None = None,
    ) -> Route:
        """Make the exchange of ids and the lookups. Returns the ids' route.

        Args:
            groups: of the cut tables.
            lookups: in the order of the output.
            sent: at least the lookups of cut tables, by the keys that are sent.
            weighted: the input has a weight per id.
            pooled: look up sums of bags; else a row per id.
            distinct: finds the ids that are sent.
        """
        context, tables = self.context, self._lookup_tables.values()
        collectives = context.collectives
        route = build_route(sent, collectives.world_size, len(groups))
        slots = route.slots[collectives.rank]
        plain = {lookup.feature for lookup in lookups if not lookup.dynamic}
        expect = Expectation(
            tables=tuple(
                (lookup.feature, lookup.layout.name, NO_LIMIT if lookup.dynamic else lookup.layout.num_embeddings)
                for lookup in lookups
            ),
            weighted=weighted,
            device=self.device,
            pooled=pooled,
            on_bad_id={feature: policy for feature, policy in context.options.on_bad_id.items() if feature in plain},
        )
        self.input = InputPlan(route, expect, context.headers, per_id=not pooled, distinct=distinct)
        dynamic = {table.layout.name: table.layout for table in tables if self._is_dynamic(table.layout)}
        options = {name: context.options.dynamic_ids[name] for name in dynamic}
        self.id_maps = IdMaps(slots, options, dynamic, self.renew_rows, self.device) if dynamic else None
        before = {"before": self.shards} if "shards" in vars(self) else {}
        self.shards = self.storage.shards(groups, slots, collectives, self.device, pooled=pooled, **before)
        numbers = [self.replica_number[lookup.layout.name] for lookup in lookups if lookup.layout.replicated]
        replicated = self._replicated_tables()
        if before and replicated == self._replicated:
            return route
        self._replicated, self.replicas = replicated, None
        if replicated:
            self.replicas = self.storage.replicas(replicated, numbers, context.gradients, self.device)
        return route

    def _plan_step(self, output: PooledOutput | SequenceOutput, lookups: Sequence[Lookup]) -> None:
        """Work out the parts of :meth:`_make`'s result that do not depend on the batch."""
        self.lookups = tuple(lookups)
        self.step_plan = StepPlan(
            input=self.input,
            lookup=self.shards,
            output=output,
            id_maps=self.id_maps,
            replicas=self.replicas,
            trains_shards=self.has_trainable_shards,
            before_rows=self.storage.before_rows,
        )

    def _build_parameters(
        self, first_values: Iterable[tuple[str, Values]], before: Mapping[str, ShardedTable] | None = None
    ) -> nn.ModuleDict:
        """Fill this rank's shards, one table at a time, from its values, if it has some.

        Args:
            first_values: per table.
            before: the tables of another plan. Their parameters are kept where they are the same memory.
        """
        modules = nn.ModuleDict()
        by_shard: dict[Shard, nn.Parameter] = {}
        for name, values in first_values:
            layout, trained = self.table_layouts[name], name not in self.frozen
            parameters: dict[Shard | None, nn.Parameter] = {}
            if layout.replicated and self.storage.trains:
                assert self.replicas is not None, "a replicated table has a lookup"
                parameters[None] = replica = self.replicas.parameters[self.replica_number[layout.name]]
                if before is None or replica is not before[name].locals.get(None):
                    replica.requires_grad_(trained)
            for shard in layout.on_rank(self.context.collectives.rank) if self.storage.trains else ():
                weight = self.shards.weight(shard)
                known = None if before is None else before[name].locals.get(shard)
                if known is None or known.data_ptr() != weight.data_ptr():
                    known = nn.Parameter(weight, requires_grad=trained)
                parameters[shard] = by_shard[shard] = known
            for parameter in parameters.values() if name in self._optimizers else ():
                # torchrec.optim's filter for "has its own optimizer" looks for this attribute.
                parameter._in_backward_optimizers = []  # type: ignore[attr-defined]
            tensors = {shard: parameter.detach() for shard, parameter in parameters.items()}
            if isinstance(values, TableDraw):
                for local_shard, tensor in tensors.items():
                    values.fill(tensor, local_shard)
            elif isinstance(values, Mapping):
                for local_shard, tensor in tensors.items():
                    tensor.copy_(values[local_shard].detach())
            elif tensors and values is not None:
                load_table(tensors, values)
            dtype, has_optimizer = self._lookup_tables[name].dtype, name in self._given.optimizers
            table = self.storage.table(layout, parameters, self.group, dtype, has_optimizer=has_optimizer)
            table.settle = partial(settle, self.context.headers.flags, self.shards)
            modules[name] = table
        self.shards.own_parameters(by_shard)
        self._watch = TableWatch(list(modules.values()))  # type: ignore[arg-type]
        return modules

    def _is_at_step(self, layout: TableLayout) -> bool:
        """Whether lookups of this rank leave a table's gradients for the step. What leaves for servers is theirs."""
        return self.context.options.updates_at_step and (layout.replicated or self.storage.before_rows is None)

    def unreduced_parameters(self) -> list[nn.Parameter]:
        """This rank's shards of the cut tables, with gradients of its own."""
        return [
            parameter
            for table in self.tables().values()
            if not table.layout.replicated
            for parameter in table.locals.values()
        ]

    def fused_optimizers(self) -> dict[str, FusedOptimizer]:
        """The fused optimizer per table that has one, by the table's own name. The same on every rank."""
        return dict(self._optimizers)

    def keep_averages(self, decay: float) -> list[RowOptimizer]:
        """Average the rows of tables with an optimizer from now on. Returns the objects with the averages of this
        rank's rows."""
        assert self.context.options.updates_at_step, "kernels that update in backward average nothing"
        self.averages = decay
        kept = self.shards.row_optimizers() + ([] if self.replicas is None else self.replicas.row_optimizers())
        for rows in kept:
            rows.keep_averages(decay)
        return kept

    def fused_state(self, table: str, state: str) -> dict[Shard | None, Tensor]:
        """This rank's parts of a fused optimizer's state, as views: (rows, cols), or (rows,) if kept per row."""
        module = self.tables()[table]
        parts: dict[Shard | None, Tensor] = {}
        for shard in module.locals:
            if shard is not None:
                parts[shard] = self.shards.states(shard)[state]
            else:
                assert self.replicas is not None, "a replica has a replicated lookup"
                parts[shard] = self.replicas.states(self.replica_number[module.layout.name])[state]
        return parts

    def step(self) -> None:
        """Update the tables with the gradients that backward has left (``update="step"``). Every rank calls it."""
        self.shards.step()
        if self.replicas is not None:
            self.replicas.step()

    def drop_gradients(self) -> None:
        """Let go of the gradients of tables with an optimizer that no step has applied."""
        for deferred in self.shards.deferred():
            deferred.drop()
        tables = self.tables()
        for name in self._optimizers:
            for parameter in tables[name].parameters():
                parameter.grad = None

    def step_counts(self) -> dict[str, int]:
        """Per table, by its name in the plan, how many updates its fused optimizer has made (for Adam's bias)."""
        replicas = {} if self.replicas is None else self.replicas.step_counts()
        maps = {} if self.id_maps is None else {f"ids of {name}": self.id_maps.step for name in self.id_maps.options}
        return self.shards.step_counts() | replicas | maps

    def load_step_counts(self, counts: Mapping[str, int]) -> None:
        """Set the counts that :meth:`step_counts` returned."""
        self.shards.load_step_counts(counts)
        if self.replicas is not None:
            self.replicas.load_step_counts(counts)
        if self.id_maps is not None:
            self.id_maps.step = max(counts.get(f"ids of {name}", 0) for name in self.id_maps.options)

    def set_learning_rate(self, optimizer: FusedOptimizer, lr: float) -> None:
        """Use ``lr`` for the tables with ``optimizer``, at the latest from the next forward on."""
        self.shards.set_learning_rate(optimizer, lr)
        if self.replicas is not None:
            self.replicas.set_learning_rate(optimizer, lr)

    def plan_faults(self, plan: ShardingPlan) -> list[str]:
        """The reasons why the tables cannot have the layouts of another plan, one sentence each."""
        tables, options = self._under(plan).values(), self.context.options.dynamic_ids
        faults = [
            cut_faults(table.layout, options[table.layout.name]) for table in tables if self._is_dynamic(table.layout)
        ]
        try:
            group_tables(tables, self.device, by_width=self._by_width)
        except PlanError as error:
            faults += error.faults
        return [fault for fault in faults if fault]

    def planned_tables(self) -> Iterator[PlannedTable]:
        """The tables as the planner takes them."""
        for name, table in self._lookup_tables.items():
            config, layout = self._config_of[name], table.layout
            pooled, dedup = isinstance(config, EmbeddingBagConfig), bool(vars(self).get("dedup"))
            yield PlannedTable(layout.name, config, table.optimizer, pooled, dedup, self._is_dynamic(layout))

    def _under(self, plan: ShardingPlan) -> dict[str, LookupTable]:
        tables = self._lookup_tables
        return {name: replace(table, layout=plan.by_name[table.layout.name]) for name, table in tables.items()}

    def replan(self, plan: ShardingPlan, stack: ExitStack) -> None:
        """Have the lookups and tables of another plan. Their values are then to be written. What stays where it is on
        this rank, of lookup groups, replicas, id maps and parameters, is that of before, with its values.

        Args:
            plan: without :meth:`plan_faults`.
            stack: has the collection again as it was when it is left.
        """
        headers, points = self.context.headers, self.context.life_cycle.points()
        before, columns = {**vars(self), "_modules": dict(self._modules)}, (headers.columns, headers.modules)
        subscribed = {name: functions[:] for name, functions in points.items()}

        def restore() -> None:
            vars(self).clear()
            vars(self).update(before)
            headers.columns, headers.modules = columns
            for name, functions in points.items():
                functions[:] = subscribed[name]

        stack.callback(restore)
        tables, replicas, id_maps, bad_ids = self.tables(), self.replicas, self.id_maps, self.input.bad_ids
        self.plan, self._ranks_per_host = plan, plan.topology.ranks_per_host
        self._given = replace(self._given, lookup_tables=self._under(plan))
        self._lookup_tables = self._given.lookup_tables
        self._number_tables()
        self.input.retire()
        self._build_lookups()
        self.input.bad_ids.copy_(bad_ids)
        if replicas is not None and replicas is not self.replicas:
            replicas.retire()
        if self.id_maps is not None and id_maps is not None:
            self.id_maps.keep(id_maps)
        values: Iterable[tuple[str, Values]] = ((name, None) for name in self._lookup_tables)
        setattr(self, self._holder, self._build_parameters(values, tables))
        if self.averages:
            self.keep_averages(self.averages)
        self.train(self.training)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise ConfigError(
            "a sharded collection cannot be copied by itself, for it exchanges together with the others of its model: "
            "copy the model that shardrec.shard returned"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Kernels own the weights' memory, so a sharded collection cannot be moved or cast."""
        probe = torch.empty(0, dtype=torch.float32, device=self.device)
        moved: Any = fn(probe)
        if moved.device.type != probe.device.type or moved.dtype != probe.dtype:
            raise ConfigError(
                f"a sharded collection on {self.device} cannot be moved or cast ({moved.device}, {moved.dtype}). Pass "
                "device= to shardrec.shard, and cast the unsharded model before"
            )
        return self


@left_alone
def _waited(pending: LazyAwaitable[Any]) -> Any:
    return pending.wait()
