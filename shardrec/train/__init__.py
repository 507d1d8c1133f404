"""Training runs: ``shardrec train`` as a function, :func:`train`, over a :class:`TrainConfig`.

In the order of a run: config (and options) → launch → ranks → session, which puts together model, prefetch, loop,
metrics, display and report. Importing this package imports neither torch nor fbgemm-gpu.
"""

from shardrec.train.config import TrainConfig, load_config
from shardrec.train.launch import train

__all__ = ["TrainConfig", "load_config", "train"]
