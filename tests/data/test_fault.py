from __future__ import annotations

from pathlib import Path

import pytest

from shardrec.data.fault import FaultLog, Reason, RowFault, explain_line
from shardrec.errors import ConfigError, DataError
from tests.data.raw import SCHEMA, line

FAULT = RowFault(reason=Reason.LABEL, where="field 'label': value '7' is not 0 or 1", remedy="correct the line")


def test_raise_tells_file_line_field_value_and_remedy() -> None:
    with pytest.raises(DataError) as caught:
        FaultLog("raise").report(Path("day_0.tsv"), 12, FAULT)
    assert str(caught.value) == (
        "day_0.tsv:12: field 'label': value '7' is not 0 or 1; correct the line, "
        'or drop such rows with on_bad_row="skip"'
    )


def test_skip_counts() -> None:
    log = FaultLog("skip")
    for number in range(3):
        log.report(Path("day_0.tsv"), number, FAULT)
    assert log.skipped == {"bad label": 3}


def test_an_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="on_bad_row is 'ignore': give 'raise' or 'skip'"):
        FaultLog("ignore")


@pytest.mark.parametrize("end", [b"", b"\r"])
def test_a_good_line_has_no_fault(end: bytes) -> None:
    assert explain_line(line(5) + end, SCHEMA) is None
    assert explain_line(b"0\t-3\t\t\tABCDEF01" + end, SCHEMA, cut=True) is None


def test_the_first_fault_of_a_line_is_told() -> None:
    fault = explain_line(b"0\tx\ty\tz\tz", SCHEMA)
    assert fault is not None
    assert fault.where.startswith("field 'int_1': value 'x'")


def test_a_test_file_without_labels_is_recognised() -> None:
    fault = explain_line(b"5\t3\t0000000a\t0000000b", SCHEMA)
    assert fault is not None
    assert "a test file without labels cannot be trained on" in fault.remedy
