"""What is published of a model, and how its versions lie in a folder.

::

    folder/
    ├── version-000000000041.json             the manifests, each of all that its version takes
    ├── version-000000000042.json
    └── data-00000028…/                       a base, here of version 40 (hexadecimal), and its deltas
        ├── rank-00000.000000000040.safetensors    all rows
        ├── rank-00000.000000000041.safetensors    rows changed since
        └── rank-00000.000000000042.safetensors

A manifest is like a checkpoint's (:mod:`shardrec.checkpoint.manifest`), is written last, and names the files of its
base and of all deltas since, with their checksums. So a version is complete without the manifests before it, and a
follower reads of it what it has not yet applied.

Tables have one tensor each, (rows, columns) of float32 or float16, or the (rows, bytes) uint8 of served rows in INT8
or INT4: scale and bias, then the codes. Rows with dynamic ids have (rows, 2) int64: the id, and 1 if the row has an id,
0 if it is free, below 0 if no id may have it. A row whose id was evicted has another id, or none.

A program without shardrec that follows (examples/cpp_serving) is told where its tensors are, see :func:`places_in`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.ids import dynamic_tables
from shardrec.checkpoint.parts import HeldTensor, Part, Rect, as_matrix
from shardrec.checkpoint.state import model_tensors
from shardrec.errors import ConfigError
from shardrec.modules.sharded_model import ShardedModel
from shardrec.serve.lookup import served_memory
from shardrec.serve.row_bytes import HEAD_BYTES, WeightFormat, dtype_of, encode, fault_of

_VERSION = re.compile(r"version-(\d{12})\.json")
_DATA = re.compile(r"data-([0-9a-f]{8})[0-9a-f]{8}")


def version_name(version: int) -> str:
    """The name of a version's manifest."""
    return f"version-{version:012}.json"


def versions_in(names: list[str]) -> list[int]:
    """The versions that have a manifest among the names of files, ascending."""
    return sorted(int(match[1]) for match in map(_VERSION.fullmatch, names) if match)


def data_name(version: int, token: str) -> str:
    """The name of the folder of a base. ``token`` has 8 hexadecimal digits."""
    return f"data-{version:08x}{token}"


def base_of(name: str) -> int | None:
    """The version of the base in a folder of this name. None for other names."""
    match = _DATA.fullmatch(name)
    return int(match[1], 16) if match else None


def published_tensors(model: ShardedModel) -> dict[str, HeldTensor]:
    """What is published of a model, before rows are encoded: tables, the ids of their rows, dense part and buffers."""
    tensors = {}
    for name, tensor in model_tensors(model).items():
        if name.startswith("ids.") and name.endswith(".records"):
            tensors[name] = replace(
                tensor,
                shape=(tensor.shape[0], 2),
                parts=tuple(
                    replace(part, rect=part.rect._replace(col_end=2), values=_ids_of(part.values))
                    for part in tensor.parts
                ),
            )
        elif name.startswith("model."):
            tensors[name] = tensor
    return tensors


def _ids_of(records: Tensor) -> Tensor:
    """(R, 2) from (R, 3): uses and last steps are for training only, and change more often than the rows served."""
    return torch.stack([records[:, 0], records[:, 1].clamp(max=1)], dim=1)


def _encoded_rect(rect: Rect, form: WeightFormat) -> Rect:
    """A part's place in the published tensor. Scale and bias belong to the part with the first column."""
    if not form.is_quantized:
        return rect
    start, end = (HEAD_BYTES + column * form.bits // 8 for column in (rect.col_start, rect.col_end))
    return rect._replace(col_start=start if rect.col_start else 0, col_end=end)


def _whole(tensor: HeldTensor, form: WeightFormat) -> HeldTensor:
    """The published tensor of a table, without parts."""
    rows, columns = tensor.shape
    cols = _encoded_rect(Rect(0, rows, 0, columns), form).cols
    return replace(tensor, shape=(rows, cols), dtype=dtype_of(form), parts=())


def encoded(tensor: HeldTensor, form: WeightFormat, ranges: Mapping[Rect, Tensor]) -> HeldTensor:
    """A table's tensor. Its rows are encoded when they are written.

    Args:
        tensor: the table, with parts on the CPU.
        form: the format.
        ranges: (rows, 2) ranges of the whole rows per part. None for a part with whole rows.

    Raises, when it is written:
        ConfigError: if the format cannot represent a value.
    """
    parts = []
    for part in tensor.parts:
        rect = _encoded_rect(part.rect, form)
        values = torch.empty((len(part.values), rect.cols), dtype=dtype_of(form), device="meta")
        rows = partial(_encode, tensor.rows_of, part, form, ranges.get(part.rect))
        parts.append(Part(rect=rect, values=values, saved=part.saved, encode=rows))
    return replace(_whole(tensor, form), parts=tuple(parts))


def _encode(table: str, part: Part, form: WeightFormat, ranges: Tensor | None, block: slice | Tensor) -> Tensor:
    weights = part.values[block]
    fault = fault_of(table, [weights], form)
    if fault:
        raise ConfigError(fault)
    rows = encode(weights, form, None if ranges is None else ranges[block])
    return rows[:, HEAD_BYTES if form.is_quantized and part.rect.col_start else 0 :].view(dtype_of(form))


def served_tensors(model: ShardedModel, formats: Mapping[str, WeightFormat]) -> dict[str, HeldTensor]:
    """A served model's tensors as they are published, in its memory. The ids of rows are copies."""
    tensors = published_tensors(model)
    by_table = {tensor.rows_of: name for name, tensor in tensors.items() if name.startswith("model.")}
    for collection in model.sharded_collections:
        memory = served_memory(collection)
        for layout in collection.table_layouts.values():
            name, form = by_table[layout.name], formats[layout.name]
            parts: list[Part] = []
            for shard in (None, *layout.shards):
                rows = memory.get(layout.name if shard is None else shard)
                if rows is None:
                    continue
                rect = Rect.whole(tensors[name].shape) if shard is None else Rect.of(shard)
                place = _encoded_rect(rect, form)
                if form.is_quantized and rect.col_start:  # each column stripe has scale and bias
                    head = place._replace(col_start=0, col_end=HEAD_BYTES)
                    parts.append(Part(rect=head, values=rows[:, :HEAD_BYTES], saved=False))
                    rows = rows[:, HEAD_BYTES:]
                parts.append(Part(rect=place, values=rows.view(dtype_of(form)), saved=False))
            tensors[name] = replace(_whole(tensors[name], form), parts=tuple(parts))
    return tensors


def places_in(
    program: torch.jit.ScriptModule, model: ShardedModel, formats: Mapping[str, WeightFormat]
) -> dict[str, object]:
    """Where a program has the tensors that are published of its model.

    Args:
        program: scripted from the model. They share memory.
        model: see :func:`served_tensors`.
        formats: of its tables.

    Returns: As JSON values, by name: ``dtype`` and ``shape`` as in a manifest, ``itemsize`` in bytes, and ``parts``,
        which have ``[row_start, row_end, col_start, col_end, attribute, offset, stride]`` each: the part's first row
        is ``offset`` bytes behind the first of the attribute, and its rows are ``stride`` bytes apart. For ids of rows
        ``[..., path, number]``: the method ``prepared`` of the module takes them as records with this number. With
        ``same_cut``, the published tensor must be cut into the same parts. Empty if a tensor has no such place in the
        program.
    """
    fallback = {
        f"ids.{table.path}.records": table.maps.options[table.layout.name].fallback_rows > 0
        for table in dynamic_tables(model)
    }
    maps = {
        block: [path, number]
        for path, module in program.named_modules()
        if module.original_name == "FrozenMaps"
        for number, block in enumerate(module.blocks)
    }
    attributes = list(chain(program.named_parameters(), program.named_buffers()))
    dtypes = {dtype: name for name, dtype in DTYPES.items()}
    places: dict[str, object] = {}
    for name, tensor in served_tensors(model, formats).items():
        parts: list[list[int | str]] = []
        for part in tensor.parts:
            if name in fallback:
                parts.append([*part.rect, *maps[tensor.rows_of, part.rect.row_start]])
                continue
            rows = as_matrix(part.values)
            for attribute, memory in attributes:
                offset = rows.data_ptr() - memory.data_ptr()
                if 0 <= offset < memory.nbytes and rows[0].is_contiguous():
                    parts.append([*part.rect, attribute, offset, rows.stride(0) * rows.itemsize])
                    break
            else:
                return {}
        places[name] = {
            "dtype": dtypes[tensor.dtype],
            "shape": tensor.shape,
            "itemsize": tensor.dtype.itemsize,
            "same_cut": name in fallback and (fallback[name] or len(parts) > 1),
            "parts": parts,
        }
    return places
