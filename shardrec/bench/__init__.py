"""Measurements of the exchange: ``shardrec bench`` as a function, :func:`bench`, over a :class:`BenchConfig`.

In the order of a run: config → run (starts the ranks) → on each rank workload, layouts, module, batches → what is
measured (bytes, with traffic for the formula) → report. Importing this package imports neither torch nor fbgemm-gpu.
"""

from shardrec.bench.config import BenchConfig
from shardrec.bench.run import bench

__all__ = ["BenchConfig", "bench"]
