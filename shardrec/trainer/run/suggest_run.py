"""``shardrec inspect --suggest``: options of a run, proposed by what the data hold; docs/models.md has the rules."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from shardrec.trainer.data.suggest import Suggestion, flow
from shardrec.trainer.run.config import load_config_text

__all__ = ["suggest_run"]

_FEW_ROWS = 1_000_000
_BATCHES = 50
"""Steps of an epoch at least, where the largest batch has more rows than that leaves."""
_SMALLEST, _LARGEST = 64, 4096
"""Rows of a batch."""
_SEQUENCE_STEPS = 15_000
_ITEMS = {"item", "product", "movie", "film", "book", "song", "track", "video", "ad"}


class _Option(NamedTuple):
    """A line of the file."""

    name: str
    value: object
    why: str


def suggest_run(suggestion: Suggestion, data: str, features: Path) -> str:
    """Options for ``shardrec train`` as YAML, with a comment on each that says why.

    Args:
        suggestion: what the data hold.
        data: the files that were looked at; others beside them with "valid" and "test" for "train" are held-out rows.
        features: where the spec will be.
    """
    rows = suggestion.rows
    options = [
        _Option("data", data, f"about {rows:,} rows"),
        *(_Option(part, name, "beside it") for part in ("valid", "test") if (name := _sibling(data, part))),
        _Option("features", features.as_posix(), "proposed with these options"),
        _Option("shuffle", max(2, min(rows, 200_000)), "rows to put in a random order at a time"),
        *(_of_interactions(suggestion) if suggestion.clicked == 1 else _of_clicks(suggestion)),
        _Option("checkpoint", "best", "the weights of the best point are tested, predicted with and served"),
    ]
    text = "".join(f"{name}: {flow(value)}  # {why}\n" for name, value, why in options)
    load_config_text(text, Path("run.yaml"))
    return text


def _of_clicks(suggestion: Suggestion) -> list[_Option]:
    """Labels of 0 and 1, or ratings above a limit."""
    rows, ids = suggestion.rows, sum(suggestion.ids.values())
    few = rows < _FEW_ROWS
    history, item = _history_and_item(suggestion)
    pooled = history is None or item is None
    size = _SMALLEST
    while size < _LARGEST and rows >= 2 * size * _BATCHES:
        size *= 2
    arguments: dict[str, object] = {} if pooled else {"history": history, "item": item}
    arguments |= {"hidden": [128, 64], "batch_norm": True, "dropout": 0.1 if few else 0.0}
    epochs = 12 if few else 3 if rows < 10 * _FEW_ROWS else 1
    why = "pairs of features, and a network over all" if pooled else "attends to the history by the item"
    return [
        _Option("model", "deepfm" if pooled else "din", why),
        _Option("model_args", arguments, "batch norm; more dropout if the model overfits"),
        _Option("global_batch_size", size, f"over all ranks; {-(-rows // size):,} steps of an epoch"),
        _Option("optimizer", "adam", "of the dense layers"),
        _Option("lr", 0.001, "of the dense layers"),
        _Option("embedding_optimizer", "adam" if few else "rowwise_adagrad", f"{rows / max(1, ids):,.0f} rows an id"),
        _Option("embedding_lr", 0.01 if few else 0.05, "of the tables"),
        _Option(
            "embedding_weight_decay", 1e-4 if few else 0.0, "more if the model overfits; few rows learn ids by heart"
        ),
        _Option("weight_decay", 1e-5 if few else 0.0, "of the dense layers"),
        _Option("epochs", epochs, "most passes over the rows; --patience ends before them"),
        _Option("schedule", "cosine", "of both learning rates"),
        _Option("decay", 1.0, "from the first step on"),
        _Option("evaluations", max(10, epochs), "points of the held-out curve"),
        _Option("patience", 3, "end after so many points without a better one"),
        _Option("monitor", "auc", "what points are compared by"),
    ]


def _of_interactions(suggestion: Suggestion) -> list[_Option]:
    """Rows that were all clicked: the model draws the others, and the clicked item is ranked among all."""
    rows, (history, item) = suggestion.rows, _history_and_item(suggestion)
    steps = -(-rows // 256)
    common = [
        _Option("loss", "model", "all rows were clicked: the clicked item against random ones"),
        _Option("ranking", "catalogue", "held-out items are ranked among all; rows, where the files have candidates"),
        _Option("optimizer", "adam", "of the dense layers"),
        _Option("lr", 0.001, "of the dense layers"),
        _Option("embedding_optimizer", "adam", "of the tables"),
        _Option("embedding_lr", 0.005, "of the tables"),
        _Option("epochs", min(100, max(5, round(_SEQUENCE_STEPS / 10 / steps))), "most passes over the rows"),
        _Option("evaluations", 10, "points of the held-out curve"),
        _Option("patience", 3, "end after so many points without a better one"),
        _Option("monitor", "ndcg", "what points are compared by"),
    ]
    if history is None or item is None:
        arguments: dict[str, object] = {"item": [item or list(suggestion.ids)[-1]]}
        return [
            _Option("model", "two_tower", "users and items; of histories in time order, shardrec sequences makes rows"),
            _Option("model_args", arguments, "check which feature is the item"),
            _Option("global_batch_size", 1024, "over all ranks; items of a batch are each other's negatives"),
            *common,
        ]
    longest = next(feature.max_length for feature in suggestion.spec.sparse if feature.name == history)
    arguments = {"history": history, "item": item, "dim": 64, "blocks": 2, "dropout": 0.5, "negatives": 1024}
    return [
        _Option("model", "sasrec", "the next item of a history"),
        _Option("model_args", {**arguments, "max_length": longest or 50}, "less dropout for more than a million rows"),
        _Option("global_batch_size", 256, f"over all ranks; {steps:,} steps of an epoch"),
        *common,
    ]


def _history_and_item(suggestion: Suggestion) -> tuple[str | None, str | None]:
    """A sequence and the feature whose table it shares; without any, the feature that is an item by its name."""
    for feature in suggestion.spec.sparse:
        if feature.kind == "sequence" and feature.share is not None:
            return feature.name, feature.share
    named = [name for name in suggestion.ids if _ITEMS.intersection(name.lower().split("_"))]
    return None, next(iter(named), None)


def _sibling(data: str, part: str) -> str | None:
    """The name of files with ``part`` for "train" in the last part of the name, if there are any."""
    folder, slash, name = data.rpartition("/")
    other = f"{folder}{slash}{name.replace('train', part)}"
    return other if "train" in name and Path(other).exists() else None
