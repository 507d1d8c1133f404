"""``shardrec ingest``: the records of a topic as files of rows, which ``shardrec train`` follows."""

from __future__ import annotations

import time
import warnings
from contextlib import closing
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardrec.files import UnreachableError
from shardrec.trainer.cli.ending import ended_by_user
from shardrec.trainer.cli.flags import Debug

_RETRY_S, _LONGEST_RETRY_S = 0.5, 30.0
"""The first wait before brokers that did not answer are asked again, and the longest one."""


def ingest_command(
    topic: Annotated[str, typer.Argument(help="kafka://HOST:PORT/TOPIC, with the format of its records.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the Parquet files. Give the same folder to continue.")],
    features: Annotated[
        Path | None, typer.Option(help="YAML file that describes the columns (default: those of Criteo's files)")
    ] = None,
    period: Annotated[
        float,
        typer.Option(
            "--every", help="Seconds from a file to the next, unless the topic has more records than fit in.", min=0
        ),
    ] = 10.0,
    keep: Annotated[
        float | None, typer.Option(help="GiB of files, above which the oldest are removed (default: all stay)", min=0)
    ] = None,
    idle: Annotated[
        float | None, typer.Option(help="Seconds without new records after which to end (default: never)", min=0)
    ] = None,
    on_bad_row: Annotated[
        Literal["error", "skip"],
        typer.Option(help="End the command at a record that is not a row, or leave the record out."),
    ] = "error",
    debug: Debug = False,
) -> None:
    """Write the records of a topic to a folder as Parquet, each once, also across kills and restarts.

    A file appears when it is complete, with the topic's offsets in its metadata. Train on the folder with
    --data feed:FOLDER. A line for each file has its rows and the number of records that are left.

    Example: shardrec ingest kafka://broker:9092/clicks incoming --features spec.yaml --keep 200

    """
    from shardrec.trainer.data import criteo_spec, load_spec
    from shardrec.trainer.data.ingest import Ingester

    spec = criteo_spec() if features is None else load_spec(features)
    bound = None if keep is None else int(keep * 2**30)
    new_at, retry_s, is_reached = time.monotonic(), _RETRY_S, False
    try:
        with closing(Ingester(topic, spec, folder, skips=on_bad_row == "skip", keep=bound)) as ingester:
            while True:
                try:
                    written, is_reached, retry_s = ingester.write(), True, _RETRY_S
                except UnreachableError as error:
                    if not is_reached:  # such as a name with a mistake
                        raise
                    warnings.warn(f"{error}. It is tried again in {retry_s:g} s", stacklevel=1)
                    time.sleep(retry_s)
                    retry_s = min(2 * retry_s, _LONGEST_RETRY_S)
                    continue
                if written is not None:
                    typer.echo(f"{written[0]}: {written[1]:,} rows, {ingester.lag:,} records behind")
                if written is not None or ingester.lag:
                    new_at = time.monotonic()
                elif idle is not None and time.monotonic() - new_at >= idle:
                    return
                if not ingester.lag:
                    time.sleep(period if idle is None else min(period, idle))
    except KeyboardInterrupt:
        ended_by_user()
        raise typer.Exit(130) from None
