from __future__ import annotations

from pathlib import Path

import pytest

from shardrec.errors import ConfigError
from shardrec.trainer.data import ClickData, FileClickData, SyntheticClickData, criteo_schema, open_click_data
from tests.trainer.data.raw import SCHEMA, SMALL_CONFIG, SPEC, lines, write


def rows_in(data: ClickData) -> int:
    """Typed with the protocol, so that the type checker sees both kinds satisfy it."""
    return sum(batch.size for batch in data.train_batches(0, 1, 16)) + sum(
        batch.size for batch in data.holdout_batches(0, 1, 4096)
    )


def test_both_kinds_have_one_interface(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tsv", lines(40))
    files, synthetic = open_click_data(str(path), spec=SPEC), open_click_data(SMALL_CONFIG)
    assert isinstance(files, FileClickData)
    assert isinstance(synthetic, SyntheticClickData)
    assert (rows_in(files), rows_in(synthetic)) == (40, 20_100)
    assert (files.schema, synthetic.schema) == (SCHEMA, SMALL_CONFIG.schema)
    assert (files.train_rows, synthetic.train_rows) == (37, 100)
    assert files.describe()
    assert synthetic.describe()


def test_a_file_has_criteos_schema_unless_told(tmp_path: Path) -> None:
    path = write(tmp_path / "data.tsv", lines(1))
    assert open_click_data([path]).schema == criteo_schema()


def test_options_of_files_do_not_go_with_generated_data() -> None:
    with pytest.raises(ConfigError, match="holdout, spec given with a SyntheticConfig: set its own fields instead"):
        open_click_data(SMALL_CONFIG, spec=SPEC, holdout=0.1)
