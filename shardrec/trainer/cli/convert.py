"""``shardrec convert``: files of rows as Parquet, which ranks read in parts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shardrec import ConfigError
from shardrec.files import os_fault
from shardrec.trainer.cli.flags import Debug
from shardrec.trainer.console import working

__all__ = ["convert_command"]


def convert_command(
    data: Annotated[
        list[str], typer.Argument(help="Files of rows, as shardrec train --data takes them.", metavar="FILES")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the Parquet files, one for each file.", metavar="DIR")],
    features: Annotated[
        Path | None, typer.Option(help="YAML file that says what the columns are (default: those of Criteo's files)")
    ] = None,
    column: Annotated[
        list[str] | None, typer.Option(help="Column to keep beside those of the features; can be repeated.")
    ] = None,
    group_rows: Annotated[int, typer.Option(help="Rows of a row group.", min=1)] = 65_536,
    debug: Debug = False,
) -> None:
    """Write the columns of files as Parquet, whose row groups ranks read in parts.

    Rows are read in bounded memory, and compared by a checksum with what was written. Values stay as they are in the
    source: rows are bit-identical to train on, in the order that the row groups make.
    """
    from shardrec.trainer.data import criteo_spec, load_spec
    from shardrec.trainer.data.to_parquet import convert
    from shardrec.trainer.data.urls import files_of, path_of

    spec = criteo_spec() if features is None else load_spec(features)
    sources = [name for pattern in data for name in files_of(pattern)]
    targets = [out / f"{Path(path_of(source)).name.split('.')[0]}.parquet" for source in sources]
    for target in targets:
        if target.exists() or targets.count(target) > 1:
            raise ConfigError(f"out (--out): {target} would be written over: give another folder, or other names")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for source, target in zip(sources, targets, strict=True):
            with working(f"converting {source}"):
                rows, checksum = convert(source, spec, target, columns=column or (), group_rows=group_rows)
            typer.echo(f"{target}: {rows:,} rows, checksum {checksum}")
    except OSError as error:
        raise ConfigError(f"out (--out) is {str(out)!r}: {os_fault(error)}; give a folder to write to") from error
