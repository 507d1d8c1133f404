"""``shardrec eval``, ``export``, ``serve``, ``inspect`` and ``compare``: what a finished run is good for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardrec.trainer.cli.flags import Debug, Device
from shardrec.trainer.console import console, working
from shardrec.trainer.run import predict
from shardrec.trainer.run.runs import RunFolder, Target, differing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table

__all__ = [
    "compare_command",
    "eval_command",
    "export_command",
    "inspect_command",
    "predict_command",
    "serve_command",
]

_OnBadRow = Annotated[
    Literal["error", "skip"] | None,
    typer.Option(help="End the command at a row that cannot be read, or leave the row out (default: the run's option)"),
]
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
    """Compute the metrics of a run's last checkpoint on other rows, of files with the run's columns.

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
    nproc: Annotated[int, typer.Option(help="Ranks to start. Under torchrun, its ranks are joined.", min=1)] = 1,
    device: Annotated[Device, typer.Option(help="Device of the model.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Write the scores of a run's last checkpoint for all rows of some files, as Parquet in the rows' order.

    Run an interrupted command again, on any number of ranks: it writes the missing parts. _manifest.json is written
    last.

    Example: shardrec predict runs/clicks --data 'april_*.parquet' --keys user,item --out scores

    """
    names = [name.strip() for name in keys.split(",") if name.strip()]
    with working(f"scoring with {run}"):
        manifest = predict(
            str(run), data, out, keys=names, on_bad_row=on_bad_row, nproc=nproc, device=device, debug=debug
        )
    if manifest is not None:
        left_out = f", left out {manifest['left_out']:,}" if manifest["left_out"] else ""
        typer.echo(f"scored {manifest['rows']:,} rows{left_out}; {len(manifest['parts'])} files in {out}")


def export_command(
    run: _Run,
    out: Annotated[Path, typer.Argument(help="File to write: .pt for script, .pt2 for aoti.", metavar="FILE")],
    to: Annotated[Target, typer.Option(help="TorchScript, or machine code by AOTInductor.")],
    weights: Annotated[str, typer.Option(help="Format of the tables: fp32, fp16, int8, int4.")] = "fp32",
    debug: Debug = False,
) -> None:
    """Write a run's last checkpoint as a file for programs that serve it. docs/serving.md has its inputs.

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
    """Answer HTTP requests with the predictions of a run's last checkpoint, one at a time, to try the model.

    POST /predict takes {"rows": [...]}, objects by the features' names. GET / shows a request.

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
    debug: Debug = False,
) -> None:
    """Show the contents of a run, a checkpoint, a plan or an exported model. Every byte of a checkpoint is verified.

    With --suggest, PATH is a data file, a pattern of files or a folder, and a spec of its columns is printed as YAML.

    Example: shardrec inspect 'day_*.parquet' --suggest > features.yaml

    """
    from shardrec.trainer.cli.inspecting import describe

    if suggest:
        from shardrec.trainer.data.suggest import suggest_spec

        typer.echo(suggest_spec(path, label), nl=False)
        return

    with working(f"reading {path}"):
        description = describe(Path(path))
    console().print(_table(description.items(), "", path))


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
