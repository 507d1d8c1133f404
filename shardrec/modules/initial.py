"""Initial values of tables.

A collection built on a real device has its values. For a collection built on ``torch.device("meta")``, with tables that
may be too large for one device, they are drawn here, in one of two ways, by the size of all its tables on meta
together:

At most :data:`WHOLE_BYTES`: each table is drawn whole, on the CPU, as the unsharded collection draws it: torch first
fills each table as ``nn.EmbeddingBag`` does, then each config's ``init_fn`` writes over it. So after
``torch.manual_seed(s)`` a meta collection that is sharded and a collection built on the CPU hold the same values,
for every plan and device.

More: by blocks of rows, each of 1 MiB in float32 and with its own seed, numbered from a seed that is drawn from torch's
generator::

    table of 10 rows, 4 to a block     rank 0 has rows 0 to 4, rank 1 rows 5 to 9
    block 0   seed + 0   rows 0..3     rank 0
    block 1   seed + 1   rows 4..7     rank 0 keeps row 4, rank 1 rows 5 to 7
    block 2   seed + 2   rows 8..9     rank 1

A rank draws the blocks that its shards have rows of, on the device of the shards, in their full width, and keeps its
rows and columns. If ranks have the same seed, the values depend on the seed, the collection's tables and the kind of
device (a GPU's generator is not the CPU's), and neither on the plan nor on the ranks.

[Note: init_fn of a block]
``init_fn`` is called with a block, (rows, embedding_dim) float32, instead of the table. A function with an argument
``generator``, as all of ``torch.nn.init`` that draw have, is given the block's, so that blocks can be drawn in several
threads. Any other draws from torch's own generators, which are seeded for it and restored. Its values must not depend
on the number of rows: ``xavier_uniform_`` and ``kaiming_uniform_`` with ``mode="fan_out"`` derive their bounds from it,
``sparse_`` counts zeros in a column. :func:`check_init_fn` calls it with two and with three rows, and raises if an
operator is given different numbers. This does not detect what an ``init_fn`` computes from values, such as a standard
deviation, or the QR decomposition in ``orthogonal_``: it is computed per block.

Modules of the dense part that are on meta are drawn by their own ``reset_parameters()``, as by TorchRec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from inspect import signature
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from shardrec.errors import ConfigError
from shardrec.layout import Shard
from shardrec.layout.discover import Collection, configs_of, tables_of

WHOLE_BYTES = 64 * 2**20
"""Most bytes of a collection's tables on meta that are drawn as the unsharded collection draws them."""

_CONTAINERS = (nn.ParameterDict, nn.ParameterList)
"""Modules that hold the parameters of the module around them."""

_BLOCK_ELEMENTS = 2**18
_MAX_THREADS = 32  # each may have a block beside the shards


@dataclass(frozen=True, kw_only=True)
class TableDraw:
    """A table with values that are drawn by blocks of rows.

    Args:
        config: of the table.
        seed: of its first block.
    """

    config: BaseEmbeddingConfig
    seed: int

    @property
    def block_rows(self) -> int:
        """Rows per block, except the last block."""
        return max(1, _BLOCK_ELEMENTS // int(self.config.embedding_dim))

    @property
    def blocks(self) -> int:
        """Number of the table's blocks."""
        return -(-int(self.config.num_embeddings) // self.block_rows)

    def fill(self, values: Tensor, shard: Shard | None) -> None:
        """Draw the values of a shard.

        Args:
            values: (rows, cols) of the shard, in the table's dtype. Is written to.
            shard: None for the whole table.
        """
        rows, columns, size = self.config.num_embeddings, self.config.embedding_dim, self.block_rows
        top, bottom, left, right = 0, rows, 0, columns
        if shard is not None:
            top, bottom, left, right = shard.row_start, shard.row_end, shard.col_start, shard.col_end

        def fill_block(number: int) -> None:
            start, end = number * size, min(rows, (number + 1) * size)
            first, last = max(start, top), min(end, bottom)
            place = values[first - top : last - top]
            if place.shape == (end - start, columns) and place.dtype is torch.float32:
                _draw(place, self.config, self.seed + number)
                return
            block = values.new_empty((end - start, columns), dtype=torch.float32)
            _draw(block, self.config, self.seed + number)
            place.copy_(block[first - start : last - start, left:right])

        numbers = range(top // size, -(-bottom // size))
        threads = min(torch.get_num_threads(), _MAX_THREADS)
        if threads == 1 or values.device.type != "cpu" or not _takes_generator(self.config.init_fn):
            for number in numbers:
                fill_block(number)
            return
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(fill_block, numbers))


def first_values(collection: Collection) -> Iterator[tuple[str, Tensor | TableDraw]]:
    """Each table's name and its (num_embeddings, embedding_dim) values before sharding, or how to draw them.

    Raises:
        ConfigError: if a table is to be drawn by blocks, and its ``init_fn`` cannot be.
    """
    pooled = isinstance(collection, EmbeddingBagCollection)
    configs, tables = configs_of(collection), tables_of(collection)
    weights = {config.name: tables[config.name].weight for config in configs}
    on_meta = {name: weight for name, weight in weights.items() if weight.is_meta}
    by_blocks = sum(weight.nbytes for weight in on_meta.values()) > WHOLE_BYTES
    if by_blocks:
        seed = int(torch.randint(2**32, ()))
    elif pooled:
        for weight in on_meta.values():
            # nn.EmbeddingBag's own draw, which the draw below overwrites.
            torch.nn.init.normal_(torch.empty_like(weight, device="cpu"))
    for config in configs:
        weight = weights[config.name]
        if config.name not in on_meta:
            yield config.name, weight.detach()
        elif by_blocks:
            check_init_fn(config)
            draw = TableDraw(config=config, seed=seed)
            seed += draw.blocks
            yield config.name, draw
        else:
            values = torch.empty_like(weight, device="cpu")
            if not pooled:
                # EmbeddingCollection writes over each table's draw before it makes the next.
                torch.nn.init.normal_(values)
            config.init_fn(values)
            yield config.name, values


def value_checksums(collection: Collection) -> dict[str, int]:
    """A checksum per table of its first values: of rows at equal distances, at most 1 MiB of a table, so that it costs
    little for any table, and notices other seeds and files, but not every single row of a larger table. It is 0 on
    meta, where a rank of another seed draws its own part: random values like any others."""
    checksums, tables = {}, tables_of(collection)
    for config in configs_of(collection):
        weight = tables[config.name].weight.detach()
        checksums[config.name] = 0
        if not weight.is_meta:
            rows = weight[:: -(-weight.nbytes // 2**20) or 1].cpu().contiguous()
            checksums[config.name] = crc32(rows.view(torch.uint8).numpy().tobytes())
    return checksums


def refuse_dense_on_meta(model: nn.Module, tables: set[nn.Parameter]) -> None:
    """Raise a ConfigError for parameters on meta that :func:`draw_dense` could not draw. ``tables`` are left out."""
    names = dict[nn.Parameter, list[str]]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta and parameter not in tables:
            names.setdefault(parameter, []).append(name)
    for parameter, paths in names.items():
        fault, path = "", paths[0].rpartition(".")[0]
        if isinstance(model.get_submodule(path), _CONTAINERS):
            path = path.rpartition(".")[0]
        if not hasattr(model.get_submodule(path), "reset_parameters"):
            fault = "its module lacks reset_parameters()"
        elif len(paths) > 1:
            fault = f"it is tied to {paths[1]!r}"
        elif hasattr(parameter, "_in_backward_optimizers"):
            fault = "its optimizer in backward would keep the parameter on meta"
        if fault:
            raise ConfigError(
                f"parameter {paths[0]!r} is on meta, and shard cannot draw it: {fault}. Build its module on a real "
                "device"
            )


@torch.no_grad()
def draw_dense(model: nn.Module, device: torch.device) -> None:
    """Move modules on meta to ``device``, with the values of their ``reset_parameters()``.

    Raises:
        ConfigError: if ``reset_parameters()`` leaves a value out.
    """
    for path, module in model.named_modules():
        parts = [module, *(part for part in module.children() if isinstance(part, _CONTAINERS))]
        if isinstance(module, _CONTAINERS) or not any(tensor.is_meta for part in parts for tensor in _tensors(part)):
            continue
        for part in parts:
            part.to_empty(device=device, recurse=False)
            for tensor in _tensors(part):
                tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
        getattr(module, "reset_parameters", lambda: None)()
        if any(bool(tensor.isnan().any()) for part in parts for tensor in _tensors(part)):
            raise ConfigError(
                f"module {path!r} is on meta, and its reset_parameters() gives some of its parameters or buffers no "
                "value. Build it on a real device"
            )


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def draw_rows(config: BaseEmbeddingConfig, shard: Shard, count: int, step: int) -> Tensor:
    """Draw new values for rows of a shard, on the CPU.

    Args:
        config: of its table.
        shard: the shard. Its first row is part of the seed, so that the values differ between row blocks.
        count: number of rows.
        step: part of the seed, so that the values differ between steps.

    Returns:
        (count, cols) float32.
    """
    values = torch.empty((count, config.embedding_dim), dtype=torch.float32)
    _draw(values, config, crc32(f"{shard.table} {shard.row_start} {step}".encode()))
    return values[:, shard.col_start : shard.col_end]


def check_init_fn(config: BaseEmbeddingConfig) -> None:
    """Raise for an ``init_fn`` that cannot draw a table by blocks of rows. See [Note: init_fn of a block].

    Raises:
        ConfigError: if its values depend on the number of rows.
    """
    seen: list[dict[Any, set[tuple[float, ...]]]] = []
    cause = None
    for rows in (2, 3):
        with _Numbers() as numbers:
            try:
                _draw(torch.empty((rows, config.embedding_dim), dtype=torch.float32), config, 0)
            except Exception as error:
                cause = error
        seen.append(numbers.of)
    if cause is not None or any(seen[0][operator] != seen[1][operator] for operator in seen[0].keys() & seen[1].keys()):
        raise ConfigError(
            f"table {config.name!r}: the values that its init_fn writes depend on the number of rows, and a table with "
            f"dynamic ids, or on meta in a collection of more than {WHOLE_BYTES >> 20} MiB, is drawn some rows at a "
            "time. Give it one with fixed numbers, such as functools.partial(torch.nn.init.uniform_, a=-0.01, b=0.01), "
            "or build the collection on the CPU"
        ) from cause


class _Numbers(TorchDispatchMode):
    """Records the operators that are called, and their number arguments (sizes are lists, and not recorded)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.of: dict[Any, set[tuple[float, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = tuple(value for value in (*args, *(kwargs or {}).values()) if isinstance(value, (int, float)))
        self.of.setdefault(func, set()).add(numbers)
        return func(*args, **(kwargs or {}))


def _draw(values: Tensor, config: BaseEmbeddingConfig, seed: int) -> None:
    """Have ``init_fn`` fill ``values`` (rows, embedding_dim) from a separate generator."""
    device = values.device
    if _takes_generator(config.init_fn):
        config.init_fn(values, generator=torch.Generator(device).manual_seed(seed))
        return
    on_cpu = device.type == "cpu"
    others = [] if on_cpu else [device.index or 0]
    with torch.random.fork_rng(others, device_type="cuda" if on_cpu else device.type):
        torch.default_generator.manual_seed(seed)
        if not on_cpu:
            torch.get_device_module(device).manual_seed(seed)
        config.init_fn(values)


def _takes_generator(init_fn: Callable[..., object]) -> bool:
    try:
        return "generator" in signature(init_fn).parameters
    except (TypeError, ValueError):  # of a function in C, which does not tell
        return False
