"""Commands for finished runs: ``eval``, ``predict``, ``recommend``, ``export``, ``serve``, ``inspect``, ``compare``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardrec import ConfigError
from shardrec.files import os_fault
from shardrec.trainer.cli.flags import Debug, Device
from shardrec.trainer.console import console, working
from shardrec.trainer.run import predict
from shardrec.trainer.run.runs import RunFolder, Target, differing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

_OnBadRow = Annotated[
    Literal["error", "skip"] | None,
    typer.Option(help="End the command at a row that cannot be read, or leave the row out (default: the run's option)"),
]
_Nproc = Annotated[int, typer.Option(help="Ranks to start; under torchrun, its ranks are joined.", min=1)]
_Run = Annotated[Path, typer.Argument(help="Folder of results of shardrec train.", metavar="RUN")]


def eval_command(
    run: _Run,
    data: Annotated[str | None, typer.Option(help="Files of rows (default: the rows of the run's own metrics)")] = None,
    on_bad_row: _OnBadRow = None,
    ranking: Annotated[
        Literal["rows", "catalogue", "unseen"] | None,
        typer.Option(help="Items among which a clicked row's item is ranked (default: the run's option)"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Compute the metrics of a run on other rows, of files with the run's columns.

    The weights are of the best checkpoint, if the run keeps it (--checkpoint best), else of the last.

    Example: shardrec eval runs/clicks --data 'march_*.parquet'
    """
    with working(f"evaluating {run}") as add_rows:
        metrics, skipped = RunFolder(run).evaluate(data, on_bad_row, add_rows, ranking=ranking)
        values = metrics.to_mapping()
    for reason, count in skipped.items():
        typer.echo(f"left out {count:,} row{'s' * (count > 1)}: {reason}", err=True)
    if as_json:
        typer.echo(json.dumps(values, indent=1))
        return
    console().print(_table(values.items(), "metric", "value"))


def predict_command(
    run: _Run,
    data: Annotated[str, typer.Option(help="Files of rows with the run's features. Labels may be missing.")],
    out: Annotated[str, typer.Option(help="Folder or URL for the scores.", metavar="DIR|URL")],
    keys: Annotated[str, typer.Option(help="Columns to write beside the scores.", metavar="COLUMN,...")] = "",
    on_bad_row: _OnBadRow = None,
    nproc: _Nproc = 1,
    device: Annotated[Device, typer.Option(help="Device of the model.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Write a run's scores of all rows of some files, as Parquet in the rows' order.

    The weights are of the best checkpoint, if the run keeps it (--checkpoint best), else of the last.

    Run an interrupted command again, on any number of ranks: it writes the missing parts. _manifest.json is written
    last.

    Example: shardrec predict runs/clicks --data 'april_*.parquet' --keys user,item --out scores

    """
    with working(f"scoring with {run}"):
        manifest = predict(
            str(run), data, out, keys=_names(keys), on_bad_row=on_bad_row, nproc=nproc, device=device, debug=debug
        )
    _show_written("scored", manifest, out)


def recommend_command(
    run: _Run,
    data: Annotated[str, typer.Option(help="Files of rows with the run's features but the item, such as users.")],
    out: Annotated[str, typer.Option(help="Folder for the Parquet files, or URL of one.", metavar="DIR|URL")],
    top: Annotated[int, typer.Option(help="Items per row.", min=1)] = 20,
    exclude_seen: Annotated[
        bool, typer.Option("--exclude-seen", help="Leave out the items that the row has, such as those of its history.")
    ] = False,
    keys: Annotated[
        str | None,
        typer.Option(help="Columns to write beside the items (default: the groups' column)", metavar="COLUMN,..."),
    ] = None,
    on_bad_row: _OnBadRow = None,
    nproc: _Nproc = 1,
    device: Annotated[Device, typer.Option(help="Where the model lives.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Write a run's best items for all rows of some files, as Parquet in the rows' order.

    The weights are of the best checkpoint, if the run keeps it (--checkpoint best), else of the last.

    Each row gets lists of items, by their ids in the data, and of scores, the best first. All items are scored. A
    command that was interrupted is given again, on any number of ranks: it writes the parts that are missing.

    Example: shardrec recommend runs/games --data users.parquet --top 20 --exclude-seen --out best
    """
    with working(f"recommending with {run}"):
        manifest = predict(
            str(run),
            data,
            out,
            top=top,
            exclude_seen=exclude_seen,
            keys=None if keys is None else _names(keys),
            on_bad_row=on_bad_row,
            nproc=nproc,
            device=device,
            debug=debug,
        )
    _show_written("recommended items to", manifest, out)


def _names(keys: str) -> list[str]:
    return [name.strip() for name in keys.split(",") if name.strip()]


def _show_written(what: str, manifest: Mapping[str, Any] | None, out: str) -> None:
    if manifest is not None:
        left_out = f", left out {manifest['left_out']:,}" if manifest["left_out"] else ""
        typer.echo(f"{what} {manifest['rows']:,} rows{left_out}; {len(manifest['parts'])} files in {out}")


def export_command(
    run: _Run,
    out: Annotated[Path, typer.Argument(help="File to write: .pt for script, .pt2 for aoti.", metavar="FILE")],
    to: Annotated[Target, typer.Option(help="TorchScript, or machine code by AOTInductor.")],
    weights: Annotated[str, typer.Option(help="Format of the tables: fp32, fp16, int8, int4.")] = "fp32",
    debug: Debug = False,
) -> None:
    """Write a run's model as a file for programs that serve it. docs/serving.md has its inputs.

    The weights are of the best checkpoint, if the run keeps it (--checkpoint best), else of the last.

    Example: shardrec export runs/clicks model.pt --to script --weights int8
    """
    with working(f"exporting {run}"):
        path = RunFolder(run).export(to, out, weights)
    typer.echo(f"wrote {path}, {path.stat().st_size:,} bytes")


def serve_command(
    run: _Run,
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 listens on all addresses.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on. 0 chooses one.", min=0, max=65535)] = 8080,
    follow: Annotated[
        str | None,
        typer.Option(help="Serve the versions that the run publishes here (its --publish).", metavar="DIR|URL"),
    ] = None,
    debug: Debug = False,
) -> None:
    """Answer HTTP requests with a run's predictions, one at a time, to try the model.

    The weights are of the best checkpoint, if the run keeps it (--checkpoint best), else of the last.

    POST /predict takes {"rows": [...]}, objects by the features' names. POST /recommend takes the same without the
    item, if the model ranks all items. GET / shows an example of each.

    Example: shardrec serve runs/clicks --port 8080

    """
    from shardrec.trainer.run.endpoint import open_server

    if follow is not None:
        typer.echo(f"serving begins with the first version that is in {follow}", err=True)
    with working(f"loading {run}"):
        server = open_server(RunFolder(run).endpoint(follow), host, port)
    typer.echo(f"serving {run} at http://{host}:{server.effective_port}/ (GET / shows an example; Ctrl-C ends)")
    try:
        server.run()
    finally:
        server.close()


def inspect_command(
    path: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint, a plan, a model to serve, or data.", metavar="PATH")
    ],
    suggest: Annotated[
        bool, typer.Option("--suggest", help="Propose a feature spec for data files, for shardrec train --features.")
    ] = False,
    label: Annotated[
        str | None,
        typer.Option(help="With --suggest: the label's column (default: by name and values)", metavar="COLUMN"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="With --suggest: folder for the spec, features.yaml, and for options of shardrec train, run.yaml "
            "(default: print the spec)",
            metavar="DIR",
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Show the contents of a run, a checkpoint, a plan or an exported model. Every byte of a checkpoint is verified.

    With --suggest, PATH is a data file, a pattern of files or a folder, and a spec of its columns is printed as YAML,
    or written to a folder with the options to train with.

    Example: shardrec inspect 'day_*.parquet' --suggest --out proposed

    """
    from shardrec.trainer.cli.inspecting import describe

    if suggest:
        _suggest(path, label, out)
        return
    if out is not None:
        raise ConfigError(f"out (--out) is {out}: it is for --suggest")

    with working(f"reading {path}"):
        description = describe(Path(path))
    console().print(_table(description.items(), "", path))


def _suggest(path: str, label: str | None, out: Path | None) -> None:
    from shardrec.trainer.data.suggest import suggest
    from shardrec.trainer.run.config import SPEC
    from shardrec.trainer.run.suggest_run import suggest_run

    suggestion = suggest(path, label)
    if out is None:
        typer.echo(suggestion.text, nl=False)
        return
    texts = {out / SPEC: suggestion.text, out / "run.yaml": suggest_run(suggestion, path, out / SPEC)}
    for target in texts:
        if target.exists():
            raise ConfigError(f"out (--out): {target} would be written over: give another folder, or remove it")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for target, text in texts.items():
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"out (--out) is {str(out)!r}: {os_fault(error)}. Give a folder to write to") from error
    typer.echo(f"wrote {' and '.join(map(str, texts))}: read both, then: shardrec train {out / 'run.yaml'}")


def compare_command(
    left: _Run,
    right: Annotated[Path, typer.Argument(help="Folder of results of another run.", metavar="RUN")],
    debug: Debug = False,
) -> None:
    """Show the options that two runs differ in, and their metrics side by side.

    Example: shardrec compare runs/first runs/second
    """
    runs = [RunFolder(path) for path in (left, right)]
    rows: list[tuple[object, ...]] = [
        (name, *values) for name, values in differing(*(run.config for run in runs)).items()
    ]
    first, second = (run.summary() for run in runs)
    names = [name for name in (*first, *second) if name not in ("data", "model", "checkpoints")]
    rows += [(name, first.get(name, ""), second.get(name, "")) for name in dict.fromkeys(names)]
    console().print(_table(rows, "", str(left), str(right)))


def _table(rows: Iterable[tuple[object, ...]], *headings: str) -> Table:
    from rich.table import Table

    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for row in rows:
        texts = ("undefined" if value is None else value for value in row)
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in texts))
    return table
