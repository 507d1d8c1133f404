"""The inventory: what a sharded model holds, listed once. Each carrier of state iterates over it (docs/design.md).

Values that a table has for its rows are :class:`RowState` records, which a collection gives. All else are
:class:`Item` records of the model: plain data to take from one model and to give to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardrec.layout import Shard
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.in_backward import dense_in_backward
from shardrec.modules.optim import FusedOptimizers
from shardrec.modules.storage import Storage
from shardrec.modules.table import ShardedTable
from shardrec.step.context import ModelContext


class Kind(Enum):
    """A kind of state. For values of rows, the first part of their names in a checkpoint."""

    WEIGHT = "model"
    """Weights of tables."""
    FUSED = "fused"
    """States of tables' optimizers."""
    AVERAGE = "average"
    """Averages of rows, and their steps."""
    IDS = "ids"
    """Dynamic ids, with uses and last steps, of rows and of those that wait for a row."""
    DENSE = "dense"
    """Parameters and buffers of modules that are not tables."""
    EXTRA = "extra"
    """Extra state of modules (``get_extra_state``)."""
    COUNTS = "counts"
    """Updates per table, and the steps of its ids."""
    SETTINGS = "settings"
    """Settings of tables' optimizers, and the entries that schedulers and wrappers keep with them."""
    IN_BACKWARD = "backward"
    """Optimizers in backward of parameters that are not tables: states and settings."""
    FROZEN = "frozen"
    """Tables that were frozen after they were sharded."""


@dataclass(frozen=True, kw_only=True)
class RowState:
    """Values that a table has for its rows.

    Args:
        kind: of them.
        table: they belong to its rows.
        name: the last part of their name.
        tensors: this rank's, by shard: (rows, cols), or (rows,) or (rows, columns) if ``columns`` is given.
        dtype: on every rank.
        columns: numbers per row that are equal in all column stripes. 0: the columns are the table's.
        first: of a row that begins again.
        own_rows: whether rows are places of their own, and not the table's rows.
    """

    kind: Kind
    table: ShardedTable
    name: str
    tensors: dict[Shard | None, Tensor]
    dtype: torch.dtype = torch.float32
    columns: int = 0
    first: float = 0.0
    own_rows: bool = False


@dataclass(frozen=True, kw_only=True)
class Item:
    """State that is not values of rows.

    Args:
        kind: of it.
        get: returns it as plain data and tensors, which may be the model's memory.
        set: gives the model such data.
    """

    kind: Kind
    get: Callable[[], Any]
    set: Callable[[Any], None]


def row_states(collection: ShardedCollection, *, to_write: bool = False) -> Iterator[RowState]:
    """The values that this rank holds for rows of a collection's tables, table after table, to read them or
    ``to_write`` them before the next forward. Kinds and names are the same on every rank."""
    optimizers, maps = collection.fused_optimizers(), collection.id_maps
    for name, table in collection.tables().items():
        state_of, given = partial(collection.fused_state, name), partial(RowState, table=table)
        weights = table.tensors(to_write=to_write)
        yield given(kind=Kind.WEIGHT, name="weight", tensors=weights, dtype=table.dtype)
        optimizer, first = optimizers.get(name), 0.0
        for state in () if optimizer is None else optimizer.states:
            assert optimizer is not None, "it has states"
            first, columns = optimizer.initial_accumulator_value, int(state in optimizer.row_states)
            yield given(kind=Kind.FUSED, name=state, tensors=state_of(state), columns=columns, first=first)
        if optimizer is not None and collection.averages:
            yield given(kind=Kind.AVERAGE, name="weight", tensors=state_of("average"))
            steps = state_of("average_step")
            yield given(kind=Kind.AVERAGE, name="step", tensors=steps, dtype=torch.int32, columns=1)
        if maps is not None and table.layout.name in maps.options:
            blocks = [(shards[0], id_map) for shards, id_map in maps.blocks(table.layout.name)]
            ids = partial(given, kind=Kind.IDS, dtype=torch.int64, columns=3)
            yield ids(name="records", tensors={shard: id_map.records for shard, id_map in blocks})
            if maps.options[table.layout.name].admit_after > 1:
                waiting = {shard: id_map.candidates for shard, id_map in blocks}
                yield ids(name="candidates", tensors=waiting, own_rows=True)


def copied(source: ShardedCollection, context: ModelContext, storage: Storage) -> ShardedCollection:
    """The same tables, with the values and counts of their rows, in another collection, with its
    model's context and storage."""
    target = type(source)(
        source, source.plan, device=source.device, group=source.group, context=context, storage=storage
    )
    if source.averages and target.fused_optimizers():
        target.keep_averages(source.averages)
    values = {(state.kind, state.table.layout.name, state.name): state.tensors for state in row_states(source)}
    for state in row_states(target, to_write=True):
        for shard, tensor in state.tensors.items():
            tensor.copy_(values[state.kind, state.table.layout.name, state.name][shard])
    if source.id_maps is not None and target.id_maps is not None:
        for key, id_map in source.id_maps.maps.items():
            target.id_maps.maps[key].copy_(id_map)  # with its hash table and its counts
    target.load_step_counts(source.step_counts())
    return target.train(source.training)


def items(
    module: nn.Module, collections: Sequence[ShardedCollection], optimizer: FusedOptimizers | None
) -> Iterator[Item]:
    """What a model holds besides the values of rows. Parameters and buffers are :func:`dense_values`.

    Args:
        module: the model, its collections sharded.
        collections: of it.
        optimizer: of its tables. None before the first use of it.
    """
    extra = {
        f"{path}._extra_state" if path else "_extra_state": child
        for path, child in module.named_modules(remove_duplicate=False)
        if type(child).get_extra_state is not nn.Module.get_extra_state
    }
    in_backward = dense_in_backward(module)

    def tables() -> Iterator[ShardedTable]:  # which another plan replaces
        for collection in collections:
            yield from collection.tables().values()

    def load_counts(counts: dict[str, int]) -> None:
        for collection in collections:
            collection.load_step_counts(counts)

    def frozen() -> list[str]:
        weights = ((table.layout.name, weight) for table in tables() for weight in table.parameters())
        return [name for name, weight in weights if not weight.requires_grad]

    def freeze(names: list[str]) -> None:
        for table in tables():
            if table.layout.name in names:
                table.requires_grad_(False)

    yield Item(
        kind=Kind.COUNTS,
        get=lambda: {key: count for collection in collections for key, count in collection.step_counts().items()},
        set=load_counts,
    )
    yield Item(kind=Kind.FROZEN, get=frozen, set=freeze)
    if optimizer is not None:
        yield Item(kind=Kind.SETTINGS, get=optimizer.settings, set=optimizer.load_settings)
    yield _by_name(Kind.EXTRA, {name: (child.get_extra_state, child.set_extra_state) for name, child in extra.items()})
    optimizers = {owner: (each.state_dict, each.load_state_dict) for owner, each in in_backward.items()}
    yield _by_name(Kind.IN_BACKWARD, optimizers)


def _by_name(kind: Kind, methods: Mapping[str, tuple[Callable[[], Any], Callable[[Any], None]]]) -> Item:
    """An item of named objects, with the methods that get and set their states."""

    def load(states: dict[str, Any]) -> None:
        for name, state in states.items():
            methods[name][1](state)

    return Item(kind=kind, get=lambda: {name: get() for name, (get, _) in methods.items()}, set=load)


def dense_values(module: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """What the modules that are not tables put into a state_dict: key, module and value."""
    for path, child in module.named_modules(remove_duplicate=False):
        values: dict[str, object] = {}
        if not isinstance(child, ShardedTable):
            child._save_to_state_dict(values, f"{path}." if path else "", keep_vars=False)
        for name, value in values.items():
            yield name, child, value
