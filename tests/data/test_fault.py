from __future__ import annotations

import pytest

from shardrec.data.fault import FaultLog, Reason, RowFault
from shardrec.errors import ConfigError, DataError

FAULT = RowFault(reason=Reason.LABEL, where="field 'label': value '7' is not 0 or 1", remedy="correct the line")


def test_raise_tells_file_line_field_value_and_remedy() -> None:
    with pytest.raises(DataError) as caught:
        FaultLog("raise").report("day_0.tsv", 12, FAULT)
    assert str(caught.value) == (
        "day_0.tsv:12: field 'label': value '7' is not 0 or 1; correct the line, "
        "or leave such rows out (on_bad_row: skip, --on-bad-row skip)"
    )


def test_skip_counts() -> None:
    log = FaultLog("skip")
    for number in range(3):
        log.report("day_0.tsv", number, FAULT)
    assert log.skipped == {"bad label": 3}


def test_an_unknown_choice() -> None:
    with pytest.raises(ConfigError, match="on_bad_row is 'ignore': give 'raise' or 'skip'"):
        FaultLog("ignore")
