"""``shardrec ingest``: the records of a topic as files of rows, which ``shardrec train`` follows."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardrec import ConfigError
from shardrec.files import UnreachableError
from shardrec.trainer.cli.ending import ended_by_user
from shardrec.trainer.cli.flags import Debug

__all__ = ["ingest_command"]

_LONGEST_WAIT_S = 30.0


def ingest_command(
    topic: Annotated[str, typer.Argument(help="kafka://HOST:PORT/TOPIC, with the format of its records.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the Parquet files; the same one, to go on.")],
    features: Annotated[
        Path | None, typer.Option(help="YAML file that says what the columns are (default: those of Criteo's files)")
    ] = None,
    every: Annotated[
        float, typer.Option(help="Seconds from a file to the next, where the topic has no more than fit in.", min=0)
    ] = 10.0,
    keep: Annotated[
        float | None, typer.Option(help="GiB of files, above which the oldest are removed (default: all stay)", min=0)
    ] = None,
    idle: Annotated[
        float | None, typer.Option(help="Seconds without new records after which to end (default: never)", min=0)
    ] = None,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="What a record that is no row does: end this, or be left out.")
    ] = "error",
    debug: Debug = False,
) -> None:
    """Write the records of a topic to a folder as Parquet, each once, over kills and restarts.

    A file appears when it is complete, with the topic's offsets in its metadata. Train on the folder with
    --data feed:FOLDER. Of each file, its rows are shown and how many records the topic has after them.
    """
    from shardrec.trainer.data import criteo_spec, load_spec
    from shardrec.trainer.data.ingest import Ingester

    spec = criteo_spec() if features is None else load_spec(features)
    bound = None if keep is None else int(keep * 2**30)
    if not topic.startswith("kafka://"):
        raise ConfigError(f"{topic} is no topic: give kafka://HOST:PORT/TOPIC")
    ingester = Ingester(topic, spec, folder, skips=on_bad_row == "skip", keep=bound)
    idle_s, retry_s, is_reached = 0.0, 0.5, False
    try:
        while True:
            try:
                written, is_reached = ingester.write(), True
            except UnreachableError as error:
                if not is_reached:  # such as a name with a mistake
                    raise
                warnings.warn(f"{error}; it is tried again in {retry_s:g} s", stacklevel=1)
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _LONGEST_WAIT_S)
                continue
            retry_s = 0.5
            if written is not None:
                path, rows = written
                typer.echo(f"{path}: {rows:,} rows, {ingester.lag:,} records behind")
            idle_s = 0.0 if written is not None or ingester.lag else idle_s
            if ingester.lag:
                continue
            if idle is not None and idle_s >= idle and written is None:
                return
            time.sleep(every)
            idle_s += every
    except KeyboardInterrupt:
        ended_by_user()
        raise typer.Exit(130) from None
