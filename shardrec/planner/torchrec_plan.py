"""TorchRec's plans and constraints, read and written.

::

    TorchRec                               shardrec
    ShardingPlan.plan[path][table]     ↔   layout of "path.table"
    ParameterSharding.sharding_spec        its shards: sizes and offsets are (rows, columns)
    sharding_type                          cut; a layout of another form is written as the nearest, see below

The path may lead to a module around the collection, such as a ``FeatureProcessedEmbeddingBagCollection`` or an
``EmbeddingTower``: the layouts are of the collection inside. A collection without a path is replicated, as by TorchRec.

A TorchRec row-wise table has one block per rank, in the order of ranks. TorchRec does not support other row cuts, so
writing such a plan raises an error with the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardrec.errors import PlanError
from shardrec.layout import Shard, ShardingPlan, TableLayout, Topology, cuts
from shardrec.planner.constraint import CUTS, Constraint

if TYPE_CHECKING:
    from torch.distributed._shard.metadata import ShardMetadata
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.types import ShardingPlan as TorchRecPlan

_TO_TORCHREC = {"grid": "grid_shard"}
_FROM_TORCHREC = {"grid_shard": "grid"}


def from_torchrec(plan: TorchRecPlan, topology: Topology, shapes: Mapping[str, tuple[int, int]]) -> ShardingPlan:
    """A TorchRec plan as one of shardrec's.

    Args:
        plan: of a model with collections that are not sharded yet. The tables of a collection that it leaves out are
            replicated.
        topology: the ranks that it is for.
        shapes: ``(num_embeddings, embedding_dim)`` by table, which TorchRec's replicated tables do not tell
            (:func:`shardrec.layout.discover.table_shapes` has them).

    Raises:
        PlanError: for tables without shards, or a table that the model does not have.
    """
    layouts, faults = [], []
    by_table: dict[str, list[str]] = {}
    for name in shapes:
        by_table.setdefault(name.rpartition(".")[2], []).append(name)
    for path, module in plan.plan.items():
        for table, sharding in module.items():
            name = f"{path}.{table}" if path else table
            if name not in shapes:  # the path is of a module around the collection
                inside = [known for known in by_table.get(table, ()) if not path or known.startswith(f"{path}.")]
                if len(inside) != 1:
                    also = f", or is any of {', '.join(inside)}: give the path of its collection" if inside else ""
                    faults.append(f"the plan has a table {name!r} that is not among the shapes given{also}")
                    continue
                name = inside[0]
            rows, cols = shapes[name]
            cut = _FROM_TORCHREC.get(sharding.sharding_type, sharding.sharding_type)
            spec = sharding.sharding_spec
            if cut != "data_parallel" and spec is None:
                faults.append(f"table {name!r} has no sharding_spec. Let TorchRec's planner make the plan complete")
                continue
            shards = () if cut == "data_parallel" else tuple(_shards(name, spec))
            layouts.append(
                TableLayout(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=cols,
                    shards=shards,
                    replicated=cut == "data_parallel",
                    cut=cut,
                )
            )
    if faults:
        raise PlanError(faults)
    planned = {layout.name.rpartition(".")[0] for layout in layouts}
    layouts += [
        cuts.data_parallel(name, *shape) for name, shape in shapes.items() if name.rpartition(".")[0] not in planned
    ]
    return ShardingPlan(topology=topology, tables=tuple(layouts))


def to_torchrec(plan: ShardingPlan, *, device: str = "cpu", paths: Mapping[str, str] | None = None) -> TorchRecPlan:
    """One of shardrec's plans for TorchRec's ``DistributedModelParallel``, with fused kernels where tables are sharded.

    Args:
        plan: has only cuts that TorchRec supports.
        device: ``"cpu"`` or ``"cuda"``.
        paths: path of each table's collection, by table name. Default: the name without its last part.

    Raises:
        PlanError: if a table is cut in a way that TorchRec does not support. Names each of them.
    """
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding
    from torchrec.distributed.types import ShardingPlan as TorchRecPlan

    modules: dict[str, EmbeddingModuleShardingPlan] = {}
    faults = [fault for layout in plan.tables for fault in _unknown_to_torchrec(layout, plan.topology)]
    if faults:
        raise PlanError(faults)
    local = plan.topology.ranks_per_host
    for layout in plan.tables:
        path = layout.name.rpartition(".")[0] if paths is None else paths[layout.name]
        table = layout.name[len(path) + 1 :] if path else layout.name
        shards = [shard for stripe in layout.stripes() for shard in stripe.shards]
        spec = None
        if not layout.replicated:
            spec = EnumerableShardingSpec([_metadata(shard, device, local) for shard in shards])
        modules.setdefault(path, EmbeddingModuleShardingPlan())[table] = ParameterSharding(
            sharding_type=_TO_TORCHREC.get(_torchrec_cut(layout), _torchrec_cut(layout)),
            compute_kernel="dense" if layout.replicated else "fused",
            ranks=list(range(plan.world_size)) if layout.replicated else [shard.rank for shard in shards],
            sharding_spec=spec,
        )
    return TorchRecPlan(plan=modules)


def constraints_from_torchrec(
    constraints: Mapping[str, ParameterConstraints], prefix: str = ""
) -> tuple[dict[str, Constraint], dict[str, float]]:
    """TorchRec's constraints as shardrec's, and the ids of a sample that they tell.

    Their settings of kernels, caches and devices are ignored.

    Args:
        constraints: by table name, as TorchRec's planner takes them.
        prefix: put before the names, which stand for tables' own names. ``"*."`` where several collections have one.

    Returns:
        For :func:`shardrec.plan`: ``constraints`` by table, and ``poolings`` by feature where the features are named.
    """
    by_table: dict[str, Constraint] = {}
    poolings: dict[str, float] = {}
    for name, each in constraints.items():
        cuts = tuple(_FROM_TORCHREC.get(kind, kind) for kind in each.sharding_types or ())
        known = tuple(cut for cut in cuts if cut in CUTS)
        if cuts and not known:
            raise PlanError(f"table {name!r}: shardrec does not have the sharding types {', '.join(cuts)}")
        by_table[f"{prefix}{name}"] = Constraint(cuts=known, min_columns=each.min_partition or 0)
        if each.feature_names:
            factors = [float(factor) for factor in each.pooling_factors]
            if len(factors) == 1:
                factors *= len(each.feature_names)
            poolings.update(zip(each.feature_names, factors, strict=False))
    return by_table, poolings


def _metadata(shard: Shard, device: str, ranks_per_host: int) -> ShardMetadata:
    from torch.distributed._shard.metadata import ShardMetadata

    number = f":{shard.rank % ranks_per_host}" if device == "cuda" else ""
    return ShardMetadata(
        shard_offsets=[shard.row_start, shard.col_start],
        shard_sizes=[shard.rows, shard.cols],
        placement=f"rank:{shard.rank}/{device}{number}",
    )


def _shards(name: str, spec: Any) -> list[Shard]:
    shards = []
    for each in spec.shards:
        (top, left), (rows, cols) = each.shard_offsets, each.shard_sizes
        if rows and cols:  # TorchRec gives a rank without rows a shard of none
            rectangle = {"row_start": top, "row_end": top + rows, "col_start": left, "col_end": left + cols}
            shards.append(Shard(table=name, rank=each.placement.rank(), **rectangle))
    return shards


def _torchrec_cut(layout: TableLayout) -> str:
    """The cut that a layout is, by its shape: names are for people and may say less."""
    if layout.replicated:
        return "data_parallel"
    stripes = layout.stripes()
    if all(len(stripe.shards) == 1 for stripe in stripes):
        if len(stripes) == 1:
            return "table_wise"
        return layout.cut if layout.cut == "table_column_wise" else "column_wise"
    if len(stripes) == 1:
        return layout.cut if layout.cut == "table_row_wise" else "row_wise"
    return "grid"


def _unknown_to_torchrec(layout: TableLayout, topology: Topology) -> list[str]:
    """Why TorchRec could not carry a layout out."""
    cut = _torchrec_cut(layout)
    if cut in ("data_parallel", "table_wise", "column_wise", "table_column_wise"):
        return []
    remedy = "constrain the table's cuts to TorchRec's and plan again"
    faults = []
    for stripe in layout.stripes():
        ranks = [shard.rank for shard in stripe.shards]
        host = ranks[0] // topology.ranks_per_host
        wanted = range(topology.world_size) if cut == "row_wise" else topology.host_ranks(host)
        if ranks != list(wanted[: len(ranks)]) or (len(ranks) < len(wanted) and layout.num_embeddings >= len(wanted)):
            place = "all ranks" if cut == "row_wise" else "the ranks of one host"
            faults.append(
                f"table {layout.name!r}: TorchRec cuts rows over {place} in order, the plan over {ranks}; {remedy}"
            )
    return faults[:1]
