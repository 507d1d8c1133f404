"""Batches changed to bad ones."""

from __future__ import annotations

from typing import Any

from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


def _changed(features: KeyedJaggedTensor, **parts: Any) -> KeyedJaggedTensor:
    given = {"keys": features.keys(), "values": features.values(), "lengths": features.lengths()}
    return KeyedJaggedTensor(**{**given, **parts})


def too_large(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    values = features.values().clone()
    values[0] = 10**6
    return _changed(features, values=values)
