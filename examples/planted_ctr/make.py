"""Rows of clicks from a planted model of second order. The best possible AUC is therefore known.

Ten fields have one value a row, drawn by Zipf's law. The log odds of a click are a factorization machine's: a constant,
a weight for each value and the dot products of the vectors of all pairs of values, scaled to a standard deviation of
3 over the rows. No model can rank better than these log odds. Their own AUC on the test rows is the optimum.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pyarrow import csv

from shardrec.trainer.data import area_under_roc

FIELDS: dict[str, int] = {
    "campaign": 60,
    "site": 50,
    "city": 40,
    "category": 30,
    "hour": 24,
    "browser": 16,
    "format": 12,
    "advertiser": 8,
    "weekday": 7,
    "device": 5,
}
"""Number of values of each field."""

_COLUMNS = 2
_EXPONENT = 0.7
_DEVIATION = 3.0
_CONSTANT = -1.0
_PARTS = {"train": 0.7, "valid": 0.2, "test": 0.1}


def drawn(rows: int, seed: int) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.float64], NDArray[np.bool_]]:
    """The values of each field (N,), the log odds (N,) and the clicks (N,)."""
    draws = np.random.default_rng(seed)
    values = {}
    vectors_ND, squares_ND = np.zeros((rows, _COLUMNS)), np.zeros((rows, _COLUMNS))
    single_N = np.zeros(rows)
    for name, count in FIELDS.items():
        shares = 1 / np.arange(1, count + 1) ** _EXPONENT
        values[name] = draws.permutation(count)[draws.choice(count, rows, p=shares / shares.sum())]
        table, weights = draws.normal(size=(count, _COLUMNS)), draws.normal(size=count)
        vectors_ND += table[values[name]]
        squares_ND += table[values[name]] ** 2
        single_N += weights[values[name]]
    pairs_N = (vectors_ND**2 - squares_ND).sum(1) / 2
    sum_N = single_N + pairs_N
    log_odds_N = _CONSTANT + _DEVIATION * (sum_N - sum_N.mean()) / sum_N.std()
    return values, log_odds_N, draws.random(rows) < 1 / (1 + np.exp(-log_odds_N))


def write(folder: Path, rows: int, seed: int) -> dict[str, float]:
    """Write ``train.csv``, ``valid.csv`` and ``test.csv``, 7 to 2 to 1, and return the best AUC by file."""
    values, log_odds, clicks = drawn(rows, seed)
    folder.mkdir(parents=True, exist_ok=True)
    optimum, start = {}, 0
    for part, share in _PARTS.items():
        stop = rows if part == "test" else start + round(rows * share)
        labels = clicks[start:stop].astype(np.int64)
        optimum[part] = area_under_roc(labels, log_odds[start:stop])
        columns = {name: pa.array(field[start:stop]).cast(pa.string()) for name, field in values.items()}
        texts = [pc.binary_join_element_wise(name, column, "-") for name, column in columns.items()]
        csv.write_csv(pa.table([pa.array(labels), *texts], ["click", *columns]), folder / f"{part}.csv")
        start = stop
    (folder / "optimum.json").write_text(json.dumps(optimum, indent=2) + "\n", encoding="utf-8")
    return optimum


def main() -> None:
    """Write the files that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/planted_ctr/data"), help="folder to write to")
    parser.add_argument("--rows", type=int, default=290_000, help="of all three files, 7 to 2 to 1")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the rows")
    given = parser.parse_args()
    optimum = write(given.out, given.rows, given.seed)
    print(", ".join(f"best AUC on the {part} rows {auc:.4f}" for part, auc in optimum.items()))


if __name__ == "__main__":
    main()
