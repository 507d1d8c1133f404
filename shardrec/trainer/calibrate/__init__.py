"""Calibration: steps and collectives timed on this machine, and the cost model's coefficients fitted to them."""

from shardrec.trainer.calibrate.fit import fewest_workloads, fit, predicted_ms, relative_errors
from shardrec.trainer.calibrate.measure import Measured, measure
from shardrec.trainer.calibrate.workload import CUTS, Workload, step_plan, table_loads, workloads

__all__ = [
    "CUTS",
    "Measured",
    "Workload",
    "fewest_workloads",
    "fit",
    "measure",
    "predicted_ms",
    "relative_errors",
    "step_plan",
    "table_loads",
    "workloads",
]
