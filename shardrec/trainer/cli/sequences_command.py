"""``shardrec sequences``: interactions of users with items as files to train a model of sequences on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardrec import ConfigError
from shardrec.files import os_fault
from shardrec.trainer.cli.flags import Debug
from shardrec.trainer.console import working


def sequences_command(
    raw: Annotated[
        str, typer.Argument(help="Files of rows, one for each interaction: text or Parquet.", metavar="FILES")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the files.", metavar="DIR")],
    user: Annotated[
        str | None, typer.Option(help="Column of the user: its name, or its place from 1.", metavar="COLUMN")
    ] = None,
    item: Annotated[str | None, typer.Option(help="Column of the item.", metavar="COLUMN")] = None,
    time: Annotated[
        str | None,
        typer.Option(
            help="Column of the time: seconds or ms since 1970, or ISO 8601 (default: the files' order)",
            metavar="COLUMN",
        ),
    ] = None,
    rating: Annotated[str | None, typer.Option(help="Column of the rating, for --above.", metavar="COLUMN")] = None,
    above: Annotated[
        float | None, typer.Option(help="Leave out the ratings up to this value (default: keep all)")
    ] = None,
    separator: Annotated[
        str | None,
        typer.Option(help="Text between columns, such as :: (default: what the lines have)", metavar="TEXT"),
    ] = None,
    header: Annotated[
        bool | None, typer.Option(help="Whether the first line has names (default: what it looks like)")
    ] = None,
    core: Annotated[int, typer.Option(help="Least interactions of a user, and of an item.", min=1)] = 1,
    split: Annotated[
        Literal["leave-one-out", "time"],
        typer.Option(help="Hold out each user's last two items, or the last fifth of all interactions by time."),
    ] = "leave-one-out",
    users: Annotated[int, typer.Option(help="Most users to rank items for.", min=1)] = 10_000,
    candidates: Annotated[
        int,
        typer.Option(
            help="Random items to rank beside a held-out item. 0 is for --ranking catalogue or unseen.", min=0
        ),
    ] = 100,
    draw: Annotated[
        Literal["uniform", "popularity"], typer.Option(help="Draw the random items evenly, or by their frequency.")
    ] = "uniform",
    negatives: Annotated[
        Literal["untrained", "unseen"],
        typer.Option(help="Leave the user's training items out of the random items, or all items of the user."),
    ] = "untrained",
    max_length: Annotated[int, typer.Option(help="Items of a history that are kept.", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="Seed of the users and the random items.")] = 0,
    on_bad_row: Annotated[
        Literal["error", "skip"], typer.Option(help="A row that cannot be read ends the command, or is left out.")
    ] = "error",
    debug: Debug = False,
) -> None:
    """Write users' item sequences, split for training, validation and test, from files of interactions.

    The folder also gets features.yaml and run.yaml, for shardrec train DIR/run.yaml, and users.parquet, for shardrec
    recommend. Columns with names such as user_id, movieId and timestamp need no options.

    Example: shardrec sequences ratings.csv --out data
    """
    from shardrec.trainer.data.interactions import Columns, read_interactions
    from shardrec.trainer.data.sequences import check_unused, write_sequences
    from shardrec.trainer.run.suggest_run import suggest_sequences_run

    if rating is not None and above is None:
        raise ConfigError(
            f"rating (--rating) is {rating!r}, and there is no --above NUMBER: give it, or leave --rating out"
        )
    check_unused(out)
    columns = Columns(user=user, item=item, time=time, rating=rating, above=above, separator=separator, header=header)
    with working(f"reading {raw}"):
        interactions = read_interactions(raw, columns, skips=on_bad_row == "skip").core(core)
    if split == "time" and "time" not in interactions.columns:
        raise ConfigError("split (--split) is 'time', and no column has the time: name it (--time COLUMN)")
    shown = ", ".join(f"{name} ({kind})" for kind, name in interactions.columns.items())
    typer.echo(
        f"{len(interactions.user_N):,} interactions of {len(interactions.user_ids):,} users with "
        f"{len(interactions.item_ids):,} items, from the columns {shown}; in the order of "
        + ("time" if "time" in interactions.columns else "the files, without --time")
        + (f"; left out {interactions.left_out:,} rows" if interactions.left_out else "")
    )
    try:
        with working(f"writing {out}"):
            rows = write_sequences(
                interactions,
                out,
                split=split,
                users=users,
                candidates=candidates,
                unseen=negatives == "unseen",
                popular=draw == "popularity",
                longest=max_length,
                seed=seed,
            )
        options = suggest_sequences_run(out, rows["train"], ranking="rows" if candidates else "catalogue")
        (out / "run.yaml").write_text(options, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out (--out) is {str(out)!r}: {os_fault(error)}. Give a folder to write to") from error
    for name, count in rows.items():
        typer.echo(f"{out / name}.parquet: {count:,} rows")
    typer.echo(f"train with: shardrec train {out / 'run.yaml'}")
