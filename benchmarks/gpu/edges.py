"""Small steps on batches at the edges of what kernels take: a key that no table has, one of two tables, no ids, faults.

Made for compute-sanitizer, which finds reads and writes out of bounds; with PYTORCH_NO_CUDA_MEMORY_CACHING=1 each
tensor is an allocation of its own, whose end it knows. Rows and trained weights are compared with those of the same
model on the CPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec import native
from shardrec.layout import ShardingPlan, TableLayout, Topology, cuts
from shardrec.modules import sequences

__all__ = ["compare", "edge_batches", "faulty_batches", "main", "new_parser"]

_ROWS, _DIM = {"t0": 40, "t1": 24, "t2": 16}, 8
_FEATURES = {"t0": ["a", "b"], "t1": ["b"], "t2": ["c"]}  # b is looked up in two tables
_KEYS = ("unused", "c", "a", "b")
_IN_ORDER = {"t0": ["a"], "t1": ["b"], "t2": ["c"]}
_NAME = "benchmarks.gpu.edges"
_LAYOUTS = ("table_wise", "row_blocks", "replicated", "cached", "host")


def edge_batches(keys: Sequence[str] = _KEYS) -> Iterator[tuple[str, KeyedJaggedTensor]]:
    """Batches of all the keys, by what is special about them."""
    generator = torch.Generator().manual_seed(0)
    for name, size, most in (("ids", 5, 4), ("no ids", 3, 0), ("one id", 1, 1), ("no samples", 0, 0), ("more", 9, 30)):
        lengths = torch.randint(0, most + 1, (len(keys) * size,), generator=generator, dtype=torch.int32)
        values = torch.randint(0, 16, (int(lengths.sum()),), generator=generator)
        yield name, KeyedJaggedTensor(list(keys), values, lengths=lengths, stride=size)


def faulty_batches(keys: Sequence[str] = _KEYS) -> Iterator[tuple[str, KeyedJaggedTensor]]:
    """Batches with ids outside of their tables, or with lengths that do not fit, by what is wrong."""
    ones, ids = [1] * 4 * len(keys), list(range(4)) * len(keys)
    for name, values, lengths in (
        ("a large id", [*ids[:-1], 2**31 + 5], ones),
        ("a negative id", [*ids[:-1], -7], ones),
        ("too many ids", ids, [0, *ones[1:]]),
        ("too few ids", ids, [900, *ones[1:]]),
        ("a negative length", ids, [5, -3, *ones[2:]]),
        ("lengths whose sum overflows", ids, [2**30] * 4 + ones[4:-1] + [5]),
    ):
        yield name, KeyedJaggedTensor(list(keys), torch.tensor(values), lengths=torch.tensor(lengths).int(), stride=4)


def compare(kind: str, layout: str, device: str) -> list[str]:
    """Train on both devices. What differs.

    Args:
        kind: ``"bags"``, ``"in order"`` (bags whose keys are those of the tables, so that a whole table is looked up
            without a wait), ``"sequences"``, ``"distinct"`` (sequences whose distinct ids are looked up) or
            ``"dynamic"`` (bags whose ids get rows when they come).
        layout: ``"table_wise"``, ``"row_blocks"`` (eight on the one rank), ``"replicated"``, or blocks in tier
            ``"cached"`` or ``"host"``.
        device: compared with the CPU.
    """
    plan = ShardingPlan(topology=Topology(ranks_per_host=1), tables=tuple(_layout(layout, name) for name in _ROWS))
    options: dict[str, Any] = {"dedup": kind == "distinct"}
    if kind == "dynamic":
        options["dynamic_ids"] = {name: shardrec.DynamicIds() for name in _ROWS}
    # One rank on CUDA would look each id up.
    with patch.object(sequences, "distinct_ids_pay", lambda device, world_size: True):
        here, there = (shardrec.shard(_module(kind), plan, device=one, **options) for one in ("cpu", device))
    wrong = []
    keys = [key for (key,) in _IN_ORDER.values()] if kind == "in order" else _KEYS
    for name, features in edge_batches(keys):
        expected, found = _values(here(features)), _values(there(features.to(torch.device(device))))
        if not torch.allclose(found.cpu(), expected, atol=1e-5):
            wrong.append(f"rows of {name}")
        gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        expected.backward(gradient)
        found.backward(gradient.to(device))
    for name, features in faulty_batches(keys) if kind != "dynamic" else ():
        with suppress(shardrec.InputError):
            _values(there(features.to(torch.device(device)))).sum().backward()
            wrong.append(f"{name} is taken")
    state = there.state_dict()
    for name, weight in here.state_dict().items():
        other = state[name]
        if not torch.allclose(weight, other.cpu(), atol=1e-5):
            wrong.append(f"weights of {name}")
    return wrong


def _module(kind: str) -> Any:
    torch.manual_seed(0)
    features = _IN_ORDER if kind == "in order" else _FEATURES
    tables = [
        {"name": name, "num_embeddings": rows, "embedding_dim": _DIM, "feature_names": features[name]}
        for name, rows in _ROWS.items()
    ]
    module = (
        EmbeddingBagCollection([EmbeddingBagConfig(**one) for one in tables])  # type: ignore[arg-type]
        if kind in ("bags", "in order", "dynamic")
        else EmbeddingCollection([EmbeddingConfig(**one) for one in tables])  # type: ignore[arg-type]
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, module.parameters(), {"lr": 0.1, "eps": 1e-8})
    return module


def _layout(layout: str, name: str) -> TableLayout:
    if layout in ("row_blocks", "cached", "host"):
        blocks = cuts.row_wise(name, _ROWS[name], _DIM, ranks=[0] * 8)
        placed = {"cached": {"tier": "cached", "load_factor": 0.5}, "host": {"tier": "host"}}.get(layout, {})
        return replace(blocks, **placed)  # type: ignore[arg-type]
    if layout == "replicated":
        return cuts.data_parallel(name, _ROWS[name], _DIM)
    return cuts.table_wise(name, _ROWS[name], _DIM, rank=0)


def _values(output: Any) -> Tensor:
    values = output.values()
    return values if isinstance(values, Tensor) else torch.cat([one.values() for one in values])


def new_parser() -> argparse.ArgumentParser:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--sanitize", action="store_true", help="under compute-sanitizer, where there is one")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Compare all of them; 1 if anything differs."""
    options = new_parser().parse_args(arguments)
    if options.sanitize:
        tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
        if tool is not None and options.device == "cuda":
            command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-u", "-m", _NAME]
            os.execve(tool, command, {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        print("without compute-sanitizer: it is not there, or there is no device", flush=True)
    differ = False
    for kind in ("bags", "in order", "sequences", "distinct", *(["dynamic"] * native.has_operators())):
        for layout in _LAYOUTS:
            if (kind, layout) == ("dynamic", "replicated"):
                continue  # which shardrec refuses
            wrong = compare(kind, layout, options.device)
            print(f"{kind} {layout}: {', '.join(wrong) or 'as on the CPU'}", flush=True)
            differ |= bool(wrong)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
