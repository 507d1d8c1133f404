"""Calibration: steps and collectives timed on this machine, and the cost model's coefficients fitted to them."""

from shardrec.planner.calibrate.fit import fewest_workloads, fit, predicted_ms, relative_errors
from shardrec.planner.calibrate.measure import Measured, measure, measure_plans
from shardrec.planner.calibrate.workload import Workload, workloads

__all__ = [
    "Measured",
    "Workload",
    "fewest_workloads",
    "fit",
    "measure",
    "measure_plans",
    "predicted_ms",
    "relative_errors",
    "workloads",
]
