"""Measurements of the exchange: ``shardrec bench`` as a function, :func:`bench`, over a :class:`BenchConfig`.

In the order of a run: config → run (starts the ranks) → on each rank workload, layouts, module, batches → what is
measured (bytes, with traffic for the formula) → report. Importing this package imports neither torch nor fbgemm-gpu.
"""

from benchmarks.harness.config import BenchConfig
from benchmarks.harness.run import bench

__all__ = ["BenchConfig", "bench"]
