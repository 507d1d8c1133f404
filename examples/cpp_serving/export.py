"""Train the click model for a moment, and save it for the C++ program: as it is and quantized, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

import shardrec
from examples.cpp_serving.model import DENSE, FEATURES, ClickModel
from shardrec import serve

__all__ = ["FORMATS", "PACKAGED", "Request", "Saved", "export", "requests"]

FORMATS = ("int8", "int4", "fp16")
PACKAGED = ("float", "int8")
"""AOTInductor also makes a package of these. Each takes a quarter of a minute."""
STEPS = 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request.

    Args:
        features: bags of F features and B samples.
        dense: (B, DENSE).
    """

    features: KeyedJaggedTensor
    dense: Tensor

    def line(self) -> str:
        """As JSON, which holds every float32 exactly."""
        body = {
            "values": self.features.values().tolist(),
            "lengths": self.features.lengths().tolist(),
            "dense": self.dense.tolist(),
        }
        return json.dumps(body)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A file, and Python's answers with its model.

    Args:
        name: of the format.
        path: the file, of TorchScript (.pt) or AOTInductor (.pt2).
        table_bytes: bytes of the tables' rows.
        answers: per request, (B,) scores.
    """

    name: str
    path: Path
    table_bytes: int
    answers: list[Tensor]


def requests(sizes: list[int], seed: int = 0) -> Iterator[Request]:
    """Random requests of ``samples`` samples, with empty and long bags."""
    draw = torch.Generator().manual_seed(seed)
    for size in sizes:
        lengths, values = [], []
        for feature, rows in FEATURES.items():
            most = 8 if feature == "history" else 2
            count = torch.randint(0, most, (size,), generator=draw)
            lengths.append(count)
            values.append(torch.randint(0, rows, (int(count.sum()),), generator=draw))
        features = KeyedJaggedTensor(list(FEATURES), torch.cat(values), lengths=torch.cat(lengths))
        yield Request(features=features, dense=torch.randn(size, DENSE, generator=draw))


def export(folder: Path, asked: list[Request]) -> list[Saved]:
    """Train on one rank, and save the float model and all of :data:`FORMATS`.

    Args:
        folder: for the files, made if it is missing.
        asked: requests that Python answers as well.
    """
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = shardrec.shard(ClickModel(), shardrec.plan(ClickModel(), shardrec.Topology(ranks_per_host=1)))
    _train(model)
    model.eval()
    saved = _save("float", model, folder, asked, sum(one.numel() * 4 for one in model.module.bags.parameters()))
    for weights in FORMATS:
        served = serve.quantize(model, weights)
        saved += _save(weights, served, folder, asked, served.table_bytes())
    return saved


def _save(name: str, model: shardrec.ShardedModel, folder: Path, asked: list[Request], table_bytes: int) -> list[Saved]:
    with torch.no_grad():
        answers = [model(one.dense, one.features) for one in asked]
    paths = [serve.save(model, folder / f"{name}.pt", features=list(FEATURES))]
    if name in PACKAGED:
        # Any call of the model is an example for all of them.
        example = next(requests([2]))
        paths.append(serve.package(model, folder / f"{name}.pt2", (example.dense, example.features)))
    return [Saved(name=name, path=path, table_bytes=table_bytes, answers=answers) for path in paths]


def _train(model: shardrec.ShardedModel) -> None:
    """A few steps towards a click that a user's and an item's number decide."""
    optimizer = torch.optim.Adam(model.dense_parameters(), lr=0.01)
    for batch in requests([64] * STEPS, seed=1):
        clicks = (batch.dense.sum(dim=1) > 0).to(torch.float32)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.features), clicks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
