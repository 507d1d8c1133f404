"""``shardrec plan``: plan tables that are described in a file, and report the plan's cost and reasons."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardrec import ConfigError
from shardrec.files import os_fault, read_text
from shardrec.trainer.cli.flags import Debug
from shardrec.trainer.console import console, working
from shardrec.trainer.yaml_files import parse_yaml

if TYPE_CHECKING:
    from shardrec import Topology
    from shardrec.planner import TableLoad

_TABLE_WIDTH = 140
_COLUMNS = ("num_embeddings", "embedding_dim")
_OPTIMIZERS = {"none": (0, 0), "sgd": (0, 0), "rowwise_adagrad": (0, 4), "adagrad": (4, 0), "adam": (8, 0)}


def plan_command(
    tables: Annotated[Path, typer.Argument(help="CSV or YAML file of tables.", metavar="TABLES")],
    ranks: Annotated[int, typer.Option(help="Ranks in all.", min=1)] = 8,
    hosts: Annotated[int, typer.Option(help="Hosts that the ranks are spread over.", min=1)] = 1,
    machine: Annotated[str, typer.Option(help="Preset of a rank's machine, such as h100 or cpu, or detect.")] = "cpu",
    memory: Annotated[
        float | None, typer.Option(help="GiB of a rank for the tables (default: the machine's)", min=0)
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Samples per rank in a step.", min=1)] = 4096,
    optimizer: Annotated[
        Literal["none", "sgd", "rowwise_adagrad", "adagrad", "adam"], typer.Option(help="Optimizer in backward.")
    ] = "rowwise_adagrad",
    instance: Annotated[str | None, typer.Option(help="Read only the lines of this instance of a CSV file.")] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(help="Cuts that may be used, such as 'user*=row_wise,table_wise@0,1'. Can be repeated."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="JSON file of shardrec calibrate (default: the preset's)")
    ] = None,
    gap: Annotated[
        float,
        typer.Option(
            help="Stop when the plan is proven to be this close to the best, as a fraction of its cost.", min=0
        ),
    ] = 0.005,
    effort: Annotated[
        int, typer.Option(help="How long to search: 40 takes seconds, a larger number longer.", min=1)
    ] = 40,
    seconds: Annotated[
        float | None, typer.Option(help="Stop after this CPU time, in seconds, with the best plan so far.", min=0.001)
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the plan to this JSON file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a page about the plan.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the load per rank.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print cost_ms, bound_ms, gap and the shards as JSON.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Plan how to shard tables, and explain the plan.

    TABLES is a CSV file with the columns num_embeddings and embedding_dim, and optionally name, count, pooling (ids of
    a sample, ';' between the features of a table) and instance. A YAML file has a list of the same under 'tables'.

    Example: shardrec plan tables.csv --ranks 16 --hosts 2 --machine h100 --html plan.html

    """
    from shardrec.planner import Profile, SolveLimits, explain, plan_tables, to_html, to_png
    from shardrec.trainer.run.option_groups import parse_constraint

    check_outputs({"--save": save, "--html": html, "--png": png})
    loads = read_tables(tables, instance=instance, optimizer=optimizer)
    with working(f"planning {len(loads)} tables on {ranks} ranks"):
        plan = plan_tables(
            loads,
            _topology(ranks, hosts, machine, memory),
            batch_size=batch_size,
            constraints=dict(map(parse_constraint, constraint or [])),
            profile=None if profile is None else Profile.load(profile),
            limits=SolveLimits(gap=gap, effort=effort, seconds=inf if seconds is None else seconds),
        )
    if save is not None:
        plan.save(save)
    if html is not None:
        to_html(plan, html)
    if png is not None:
        to_png(plan, png)
    report = plan.report
    assert report is not None, "the planner reports on its plans"
    if as_json:
        shards = {each["name"]: each["shards"] for each in plan.to_json()["tables"]}
        numbers = {"cost_ms": report.cost_ms, "bound_ms": report.bound_ms, "gap": report.gap}
        cuts = {each.name: each.cut for each in report.tables}
        typer.echo(json.dumps({**numbers, "timed_out": report.timed_out, "cuts": cuts, "shards": shards}, indent=1))
        return
    console(_TABLE_WIDTH).print(explain(plan))


def check_outputs(paths: Mapping[str, Path | None]) -> None:
    """Find out before a long search, not after it, that a file cannot be written.

    Raises:
        ConfigError: naming each option and the fault of its path.
    """
    faults = []
    for option, path in paths.items():
        if path is None:
            continue
        folder = path.parent
        if path.is_dir():
            faults.append(f"{option} {path} is a folder. Give the name of a file in it")
        elif not folder.is_dir():
            faults.append(f"{option} {path}: folder {folder} does not exist. Make it first")
        elif not os.access(path if path.exists() else folder, os.W_OK):
            faults.append(f"{option} {path} cannot be written. Give a path that can")
    if faults:
        raise ConfigError("; ".join(faults))


def read_tables(path: Path, *, instance: str | None = None, optimizer: str = "rowwise_adagrad") -> dict[str, TableLoad]:
    """The tables of a CSV or YAML file, by name.

    Args:
        path: of the file.
        instance: only lines of this instance.
        optimizer: its state is kept for each table.

    Raises:
        ConfigError: naming file, line and the fault there.
    """
    try:
        rows = _yaml_rows(path) if path.suffix in (".yaml", ".yml") else _csv_rows(path)
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{os_fault(error)}. Give a CSV or YAML file of tables") from error
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: {error}") from error
    named = sorted({str(row["instance"]) for _, row in rows if row.get("instance")})
    if instance is None and len(named) > 1:
        raise ConfigError(f"{path} holds {len(named)} instances. Give --instance with one of {', '.join(named)}")
    if instance is not None:
        rows = [(where, row) for where, row in rows if row.get("instance") == instance]
        if not rows:
            raise ConfigError(f"{path} lacks instance {instance!r}. It has {', '.join(named) or 'none'}")
    loads: dict[str, TableLoad] = {}
    for where, row in rows:
        load = _load(f"{path}:{where}", row, optimizer)
        count = _whole(f"{path}:{where}", "count", row.get("count") or 1)
        for number in range(count):
            base = str(row.get("name") or f"t{len(loads)}")
            name = base if count == 1 or not row.get("name") else f"{base}_{number}"
            if name in loads:
                raise ConfigError(f"{path}:{where}: there are two tables {name!r}. Give each a name of its own")
            loads[name] = load
    if not loads:
        raise ConfigError(f"{path} holds no table")
    return loads


def _csv_rows(path: Path) -> list[tuple[int, Mapping[str, object]]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path} lacks column {missing[0]!r}. Its first line must name {', '.join(_COLUMNS)}")
        return [(reader.line_num, row) for row in reader]


def _yaml_rows(path: Path) -> list[tuple[int, Mapping[str, object]]]:
    data, root = parse_yaml(read_text(path), str(path))
    tables = data.get("tables") if isinstance(data, Mapping) else None
    if root is None or not isinstance(tables, list) or not all(isinstance(each, Mapping) for each in tables):
        raise ConfigError(f"{path} lacks a list of tables. Write 'tables:' and one entry for each")
    nodes = next((value.value for key, value in root.value if key.value == "tables"), [root] * len(tables))
    return [(node.start_mark.line + 1, table) for node, table in zip(nodes, tables, strict=True)]


def _load(where: str, row: Mapping[str, object], optimizer: str) -> TableLoad:
    from shardrec.planner import TableLoad

    known = {"name", "count", "pooling", "instance", *_COLUMNS}
    unknown = [name for name in row if name not in known]
    if unknown:
        raise ConfigError(f"{where}: a table lacks {unknown[0]!r}. It has {', '.join(sorted(known))}")
    missing = [name for name in _COLUMNS if row.get(name) in (None, "")]
    if missing:
        raise ConfigError(f"{where}: {missing[0]} is missing")
    pooling = row.get("pooling")
    poolings = [1] if pooling in (None, "") else pooling if isinstance(pooling, list) else str(pooling).split(";")
    try:
        ids = tuple(float(each) for each in poolings)
    except (TypeError, ValueError):
        raise ConfigError(f"{where}: pooling is {pooling!r}. Give numbers, with ';' between them") from None
    per_weight, per_row = _OPTIMIZERS[optimizer]
    try:
        return TableLoad(
            num_embeddings=_whole(where, "num_embeddings", row["num_embeddings"]),
            embedding_dim=_whole(where, "embedding_dim", row["embedding_dim"]),
            poolings=ids,
            state_bytes=per_weight,
            row_state_bytes=per_row,
            whole_row_state=optimizer == "rowwise_adagrad",
            fused=optimizer != "none",
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where not in str(error) else str(error)) from None


def _whole(where: str, name: str, value: object) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = 0
    if number < 1:
        raise ConfigError(f"{where}: {name} is {value!r}. Give a whole number, at least 1")
    return number


def _topology(ranks: int, hosts: int, machine: str, memory: float | None) -> Topology:
    from shardrec import Topology
    from shardrec.layout import detect_machine, preset

    if ranks % hosts:
        raise ConfigError(f"{ranks} ranks cannot be spread evenly over {hosts} hosts. Give a multiple of {hosts}")
    local = ranks // hosts
    hardware = detect_machine(local) if machine == "detect" else preset(machine)
    if memory is not None:
        tier = "device_memory" if hardware.kind == "cuda" else "host_memory"
        hardware = replace(hardware, **{tier: memory * 2**30})  # type: ignore[arg-type]
    return Topology(hosts=hosts, ranks_per_host=local, machine=hardware)
