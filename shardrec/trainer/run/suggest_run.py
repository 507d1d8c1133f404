"""``shardrec inspect --suggest`` and ``sequences``: options of a run by what the data hold (rules: docs/models.md)."""

from __future__ import annotations

from pathlib import Path

from shardrec.trainer.data.spec import read_spec
from shardrec.trainer.data.suggest import Suggestion, flow
from shardrec.trainer.run.config import SPEC, load_config_text

_FEW_ROWS = 1_000_000
_STEPS = 50
"""Steps of an epoch at least, as far as the smallest batch allows."""
_SMALLEST, _LARGEST = 64, 4096
"""Rows of a batch."""
_INTERACTION_STEPS = 2_400
"""Steps of a run on interactions, in 5 to 100 epochs."""
_ITEMS = {"item", "product", "movie", "film", "book", "song", "track", "video", "ad"}

_FIRST = """data: {data}  # about {rows:,} rows; paths are relative to the working directory
{held_out}features: {features}  # proposed with these options
shuffle: {shuffle}  # rows to put in a random order at a time
checkpoint: best  # the weights of the best point are tested, predicted with and served
patience: 3  # end after this number of points of the held-out curve without a better one
optimizer: adam  # of the dense layers
lr: 0.001  # of the dense layers
"""
_CLICKS = """monitor: auc  # what points of the curve are compared by
schedule: cosine  # of both learning rates
decay: 1.0  # from the first step on
model: {model}  # {why}
model_args: {arguments}  # more dropout, or smaller layers, if the model overfits
global_batch_size: {size}  # over all ranks; {steps:,} steps of an epoch
epochs: {epochs}  # most passes over the rows
evaluations: {points}  # points of the curve
embedding_optimizer: {optimizer}  # of the tables; {per_id:,.0f} rows an id
embedding_lr: {embedding_lr}  # of the tables
embedding_weight_decay: {decay}  # ten times more if the model overfits: rare ids are learned by heart
"""
_INTERACTIONS = """monitor: ndcg  # what points of the curve are compared by
loss: model  # all rows were clicked: the clicked item against others
ranking: {ranking}  # held-out items are ranked among all (catalogue), or among the candidates in the files (rows)
evaluations: 5  # points of the curve
model: {model}  # {why}
model_args: {arguments}  # less dropout for more rows
global_batch_size: {size}  # over all ranks; {steps:,} steps of an epoch
embedding_optimizer: adam  # of the tables
embedding_lr: 0.005  # of the tables
epochs: {epochs}  # most passes over the rows
"""


def suggest_sequences_run(folder: Path, rows: int, *, ranking: str) -> str:
    """:func:`suggest_run` for the files of ``shardrec sequences`` in a folder, with that number of training rows."""
    suggestion = Suggestion(text="", spec=read_spec(folder / SPEC), rows=rows, ids={}, clicked=1.0)
    return suggest_run(suggestion, (folder / "train.parquet").as_posix(), folder / SPEC, ranking=ranking)


def suggest_run(suggestion: Suggestion, data: str, features: Path, *, ranking: str = "catalogue") -> str:
    """Options for ``shardrec train`` as YAML, with a comment on each that says why.

    Args:
        suggestion: what the data hold.
        data: the files that were looked at. Others beside them with "valid" and "test" for "train" are held-out rows.
        features: where the spec will be.
        ranking: among which items the items of interactions are ranked.
    """
    rows = suggestion.rows
    siblings = {part: name for part in ("valid", "test") if (name := _sibling(data, part))}
    text = _FIRST.format(
        data=flow(data),
        rows=rows,
        held_out="".join(f"{part}: {flow(name)}  # beside it\n" for part, name in siblings.items()),
        features=flow(features.as_posix()),
        shuffle=max(2, min(rows, 200_000)),
    )
    text += _of_interactions(suggestion, ranking) if suggestion.clicked == 1 else _of_clicks(suggestion)
    load_config_text(text, Path("run.yaml"))
    return text


def _of_clicks(suggestion: Suggestion) -> str:
    """Labels of 0 and 1, or ratings above a limit."""
    rows, few = suggestion.rows, suggestion.rows < _FEW_ROWS
    model, why, arguments = "deepfm", "pairs of features, and a network over all", dict[str, object]()
    history, item = _history_and_item(suggestion)
    if history is not None:
        model, why, arguments = "din", "looks at the history by the item", {"history": history, "item": item}
    arguments |= {"hidden": [128, 64], "batch_norm": True, "dropout": 0.1 if few else 0.0}
    size = _SMALLEST
    while size < _LARGEST and rows >= 2 * size * _STEPS:
        size *= 2
    epochs = 12 if few else 3 if rows < 10 * _FEW_ROWS else 1
    tables = {"optimizer": "adam", "embedding_lr": 0.01, "decay": 1e-4}
    if not few:
        tables = {"optimizer": "rowwise_adagrad", "embedding_lr": 0.05, "decay": 0.0}
    return _CLICKS.format(
        model=model,
        why=why,
        arguments=flow(arguments),
        size=size,
        steps=-(-rows // size),
        epochs=epochs,
        points=max(10, epochs),
        per_id=rows / sum(suggestion.ids.values()),
        **tables,
    )


def _of_interactions(suggestion: Suggestion, ranking: str) -> str:
    """Rows that were all clicked."""
    history, item = _history_and_item(suggestion)
    if history is None:
        model, why, size = "two_tower", "of interactions in time order, shardrec sequences makes histories", 1024
        arguments: dict[str, object] = {"item": [item or [*suggestion.ids][-1]]}
    else:
        model, why, size = "sasrec", "the next item of a history", 256
        arguments = {"history": history, "item": item, "dim": 64, "blocks": 2, "dropout": 0.5, "negatives": 1024}
        longest = next(feature.max_length for feature in suggestion.spec.sparse if feature.name == history)
        arguments["max_length"] = longest or 50
    steps = -(-suggestion.rows // size)
    epochs = min(100, max(5, round(_INTERACTION_STEPS / steps)))
    return _INTERACTIONS.format(
        model=model, why=why, arguments=flow(arguments), size=size, steps=steps, epochs=epochs, ranking=ranking
    )


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
