"""``shardrec.serve.quantize``: makes an inference model from a trained one."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardrec.errors import ConfigError
from shardrec.exchange.agree import all_gather, by_rank, ranks_of
from shardrec.exchange.peers import peers
from shardrec.modules import ShardedEmbeddingBagCollection, ShardedModel
from shardrec.modules.collection import ShardedCollection
from shardrec.modules.inventory import copied
from shardrec.modules.sharded_model import require_sharded
from shardrec.serve.lookup import served_memory, served_storage
from shardrec.serve.row_bytes import WeightFormat, encode, fault_of, row_ranges
from shardrec.serve.served_model import ServedModel
from shardrec.step.context import ModelContext

CHUNK = 2**20
"""Rows converted at a time. Bounds the memory of the conversion."""

_UNITS = {False: 16, True: 32}
"""The bits of a row's columns must be a multiple of this number. Keyed by whether the device is CUDA."""


@torch.inference_mode(False)  # an inference tensor could not be written later
def quantize(model: ShardedModel, weights: str = "int8", *, tables: Mapping[str, str] | None = None) -> ServedModel:
    """Make an inference model from a trained, sharded one, with its tables in fbgemm's inference kernels.

    Plan, routes and exchanges stay the same. Each rank converts its own shards. A row's scale and bias belong to the
    whole row, so the sharding does not change the rows that a table returns. The dense part is copied. Collective, like
    ``shard``: all ranks call it with the same arguments.

    Args:
        model: a model that ``shardrec.shard`` returned, on one rank or several, on the CPU or on CUDA. It is not
            changed and shares no memory with the result. If it has replicas, call ``sync_replicas()`` first.
        weights: format of the rows: ``"int8"`` or ``"int4"``, a code per column and a float16 scale and bias per row;
            ``"fp16"``; or ``"fp32"``, which changes no value.
        tables: formats of single tables, by their names in the plan.

    Returns:
        The inference model, in eval mode: called like ``model``, without gradients. ``shardrec.script`` and
        :func:`shardrec.serve.save` accept it.

    Raises:
        ConfigError: on every rank, if a format or table does not exist, if a format cannot represent a value (not
            finite, or beyond ±65504 unless FP32), if an INT4 shard on CUDA has a width that is not a multiple of 8, or
            if the model's tables are on servers.
    """
    require_sharded(model, "shardrec.serve.quantize")
    if isinstance(model, ServedModel):
        raise ConfigError("the model is quantized already: give shardrec.serve.quantize what shardrec.shard returned")
    if model.servers:
        raise ConfigError(
            f"the model's tables are on {model.servers} embedding server(s), and this process has nothing to quantize: "
            "load its checkpoint into a model that shardrec.shard made without servers, and quantize that one"
        )
    sources = [child for child in model.module.modules() if isinstance(child, ShardedCollection)]
    formats = table_formats(sources, weights, tables or {})
    context = ModelContext(model.context.collectives, model.context.device, model.context.options)
    # deepcopy finds the served collections in its memo, so it does not copy a trained table.
    memo: dict[int, ShardedCollection] = {}
    for source in sources:
        storage = served_storage(formats, pooled=isinstance(source, ShardedEmbeddingBagCollection))
        memo[id(source)] = copied(source, context, storage)
    module = memo.get(id(model.module)) or copy.deepcopy(model.module, dict(memo))
    faults = [fault for source in sources for fault in _convert(source, memo[id(source)], formats)]
    group = next((source.group for source in sources), None)  # of the replica, if there are several
    texts = all_gather("; ".join(faults), ranks_of(group, model.context.device), "quantization")
    if any(texts):
        raise ConfigError("; ".join(by_rank(texts)))
    return ServedModel(module, model.plan, context, formats)


def table_formats(sources: list[ShardedCollection], weights: str, tables: Mapping[str, str]) -> dict[str, WeightFormat]:
    """The format per table, by its name in the plan. Raises as :func:`quantize`."""
    layouts = [layout for source in sources for layout in source.table_layouts.values()]
    unknown = sorted(set(tables) - {layout.name for layout in layouts})
    if unknown:
        known = ", ".join(repr(layout.name) for layout in layouts[:12])
        raise ConfigError(
            f"tables names {', '.join(map(repr, unknown))}. The model's tables are {known}: use their names"
        )
    formats = {layout.name: _format(tables.get(layout.name, weights)) for layout in layouts}
    on_cuda = any(source.device.type == "cuda" for source in sources)
    for layout in layouts:
        form, unit = formats[layout.name], _UNITS[on_cuda]
        widths = {stripe.col_end - stripe.col_start for stripe in layout.stripes()} or {layout.embedding_dim}
        if any(width * form.bits % unit for width in widths):
            raise ConfigError(
                f"table {layout.name!r} has shards of {', '.join(map(str, sorted(widths)))} columns; {form.name} rows"
                f"{' on CUDA' * on_cuda} have a multiple of {unit // form.bits}: give the table another format with "
                "tables={...}, or cut it elsewhere"
            )
    return formats


def _format(word: str) -> WeightFormat:
    try:
        return WeightFormat(word)
    except ValueError:
        known = ", ".join(repr(form.value) for form in WeightFormat)
        raise ConfigError(f"weights are to be {word!r}. Tables are kept as one of {known}: name one") from None


def _convert(
    source: ShardedCollection, target: ShardedCollection, formats: Mapping[str, WeightFormat]
) -> Iterator[str]:
    """Convert this rank's parts of all tables. Yield messages about faults, which the ranks then raise together."""
    memory = served_memory(target)
    for name, table in source.tables().items():
        layout, form = table.layout, formats[table.layout.name]
        parts = table.tensors()
        bad = fault_of(name, parts.values(), form)
        if bad:
            yield bad
        shared = form.is_quantized and len(layout.stripes()) > 1
        for first in range(0, layout.num_embeddings, CHUNK):
            last = min(first + CHUNK, layout.num_embeddings)
            ranges = None
            if shared:
                of_shards = [(shard.row_start, weight) for shard, weight in parts.items() if shard is not None]
                ranges = whole_row_ranges(of_shards, torch.arange(first, last), source.device, source.group)
            for shard, weight in parts.items():
                top = 0 if shard is None else shard.row_start
                rows = slice(max(first, top) - top, max(min(last, top + weight.size(0)) - top, 0))
                part = weight[rows].nan_to_num(0.0, 0.0, 0.0) if bad else weight[rows]
                if part.size(0):
                    span = None if ranges is None else ranges[rows.start + top - first : rows.stop + top - first]
                    memory[layout.name if shard is None else shard][rows].copy_(encode(part, form, span))


def whole_row_ranges(
    parts: Iterable[tuple[int, Tensor]], rows: Tensor, device: torch.device, group: dist.ProcessGroup | None
) -> Tensor:
    """The ranges of some rows of a table with columns on several ranks of a group. All of these ranks call it.

    Args:
        parts: first row and weights per shard of this rank.
        rows: (n,) int64, ascending, equal on all ranks.
        device: of the weights and the result.
        group: of the ranks. None on one.

    Returns: (n, 2), see :func:`shardrec.serve.row_bytes.row_ranges`.
    """
    ranges = torch.full((len(rows), 2), -torch.inf, dtype=torch.float32, device=device)
    for first, weight in parts:
        begin, end = torch.searchsorted(rows, torch.tensor([first, first + len(weight)])).tolist()
        if begin < end:
            part_ranges = row_ranges(weight[(rows[begin:end] - first).to(device)])
            ranges[begin:end] = torch.maximum(ranges[begin:end], part_ranges)
    if group is not None:
        with peers(group, "ranges of rows"):
            dist.all_reduce(ranges, dist.ReduceOp.MAX, group)
    return ranges
