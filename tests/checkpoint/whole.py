"""A checkpoint's tensors, whole, without a model."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from shardrec.checkpoint.data_files import DTYPES
from shardrec.checkpoint.load import Source
from shardrec.checkpoint.manifest import read_manifest
from shardrec.checkpoint.parts import as_matrix
from shardrec.exchange.agree import ranks_of

__all__ = ["contents"]


def contents(folder: Path) -> dict[str, Tensor]:
    """By name, as bytes, so that NaN is NaN."""
    found = {}
    with ExitStack() as stack:
        source = Source(folder, ranks_of(None, torch.device("cpu")), stack)
        source.manifest = read_manifest(folder)
        for name, saved in source.manifest.tensors.items():
            value = torch.empty(saved.shape, dtype=DTYPES[saved.dtype])
            for part in saved.parts:
                into = as_matrix(value)[
                    part.rect.row_start : part.rect.row_end, part.rect.col_start : part.rect.col_end
                ]
                part.read(source._file, value.dtype, into, part.rect, source._buffer)
            found[name] = value.view(-1).view(torch.uint8)
    return found
