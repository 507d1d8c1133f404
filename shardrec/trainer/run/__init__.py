"""Training runs: ``shardrec train`` as a function, :func:`train`, over a :class:`TrainConfig`.

In the order of a run: config (of option groups, and options) → launch → the ranks (:mod:`shardrec.launch`) → session,
which puts together model, prefetch, loop, saving, metrics (of several labels: tasks), display and report; and from
:func:`predict` to scores, and by recommend to catalogue. Importing this package imports neither torch nor fbgemm-gpu.
"""

from shardrec.launch import RunStopped
from shardrec.trainer.run.config import TrainConfig, load_config
from shardrec.trainer.run.launch import predict, train
from shardrec.trainer.run.runs import RunFolder

__all__ = ["RunFolder", "RunStopped", "TrainConfig", "load_config", "predict", "train"]
