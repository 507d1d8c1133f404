"""Rows of clicks for recommender models: files of columns, and a generator whose optimum is known::

    data = open_click_data("day_0.tsv.gz", holdout=0.1)           # or open_click_data(SyntheticConfig(seed=1))
    for batch in data.train_batches(rank, world_size, batch_size=2048):
        loss = model(batch.dense, batch.sparse, batch.labels)

Files are named for the steps of the data: ``spec`` and ``tasks`` (what the columns are; ``suggest`` proposes a spec,
``vocabulary`` counts its values, ``spelling`` decides how ids are spelled) → ``formats`` (files that are not Parquet;
``svmlight`` parses LIBSVM's lines), which ``convert`` converts → ``order`` (which rows, of which files, on which rank;
which are held out) → ``tables`` (Parquet as Arrow tables) or ``request`` (rows as JSON) → ``encode`` with ``ids``, and
``fault`` for what is wrong → ``preprocess`` → ``rows`` → ``reading`` (ahead, on threads) → ``files`` (as
batches, which ``click_data`` describes); ``zipf`` → ``planted`` → ``synthetic`` for generated rows, which ``write``
turns into files; and ``metrics`` and ``ranking`` of predictions. ``feed`` is of files that go on arriving: ``ingest``
writes those of a topic, which ``kafka`` reads and ``records`` decodes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardrec.trainer.data.click_data import ClickBatch, ClickData
    from shardrec.trainer.data.fault import Reason
    from shardrec.trainer.data.files import FileClickData, open_click_data
    from shardrec.trainer.data.metrics import ClickMetrics, area_under_roc, click_metrics
    from shardrec.trainer.data.planted import SyntheticConfig
    from shardrec.trainer.data.preprocess import hash_categories, transform_dense
    from shardrec.trainer.data.ranking import RankingMetrics, ranking_metrics
    from shardrec.trainer.data.request import batch_of_request, request_example
    from shardrec.trainer.data.schema import CRITEO_CARDINALITIES, ClickSchema, criteo_schema
    from shardrec.trainer.data.spec import Feature, FeatureSpec, Label, click_spec, criteo_spec, load_spec
    from shardrec.trainer.data.synthetic import BestMetrics, SyntheticClickData
    from shardrec.trainer.data.tasks import Task
    from shardrec.trainer.data.write import write_criteo_tsv, write_parquet

__all__ = [
    "CRITEO_CARDINALITIES",
    "BestMetrics",
    "ClickBatch",
    "ClickData",
    "ClickMetrics",
    "ClickSchema",
    "Feature",
    "FeatureSpec",
    "FileClickData",
    "Label",
    "RankingMetrics",
    "Reason",
    "SyntheticClickData",
    "SyntheticConfig",
    "Task",
    "area_under_roc",
    "batch_of_request",
    "click_metrics",
    "click_spec",
    "criteo_schema",
    "criteo_spec",
    "hash_categories",
    "load_spec",
    "open_click_data",
    "ranking_metrics",
    "request_example",
    "transform_dense",
    "write_criteo_tsv",
    "write_parquet",
]

_FILES = ("spec", "schema", "fault", "preprocess", "files", "metrics", "ranking", "synthetic", "write", "request")


def __getattr__(name: str) -> object:
    """Imports a name at its first use, for what ingests a topic needs no torch."""
    for home in _FILES if name in __all__ else ():
        module = import_module(f"{__name__}.{home}")
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
