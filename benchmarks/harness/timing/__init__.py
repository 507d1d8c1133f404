"""Timing steps beside TorchRec's, plain torch's and bare kernels': ``shardrec bench`` without ``--bytes``.

In the order of a run: config → matrix (cases) → run → plans, inputs → processes (fresh ranks for each turn)
→ on each rank: sides, digest, clock → record (rounds, ratios) → floor → report → tables, png. Importing this package
imports neither torch nor fbgemm-gpu.
"""

from benchmarks.harness.timing.config import TimingConfig
from benchmarks.harness.timing.run import time_steps

__all__ = ["TimingConfig", "time_steps"]
