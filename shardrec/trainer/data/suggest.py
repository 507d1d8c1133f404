"""``shardrec inspect --suggest``: a feature spec proposed from the columns of a file.

The first rows are looked at, at most 32 MiB of text or 500,000 rows of Parquet. docs/data.md has the rules.
Vocabularies are left to training (``from_data``), which counts them in all its rows.
"""

from __future__ import annotations

import csv as standard_csv
import lzma
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardrec import DataError
from shardrec.trainer.data.arrays import is_number, is_text, plain
from shardrec.trainer.data.formats import file_kind, text_head, usual_delimiter
from shardrec.trainer.data.spec import FeatureSpec, parse_spec
from shardrec.trainer.data.svmlight import parse_svmlight
from shardrec.trainer.data.urls import files_of, open_input

if TYPE_CHECKING:
    import pyarrow as pa

_Settings: TypeAlias = dict[str, object]
"""What a spec says of a file or a feature, by field."""

_MAX_BYTES = 32 << 20
_MAX_ROWS = 500_000
_FEW, _MANY = 100, 50_000
"""Distinct values: of a whole number that is a category whatever its name; of a column that is hashed."""

_LABELS = set("label click clicked target y converted conversion purchase purchased bought like liked".split())  # noqa: SIM905
_RATINGS = {"rating", "ratings", "stars", "score"}
_IDS = {"id", "ids", "code", "zip", "key", "hash"}
_THINGS = set("user customer member item product movie film book song track artist video ad shop store".split())  # noqa: SIM905
_IN_ORDER = {"history", "sequence", "seq", "recent", "last", "session", "previous", "past", "viewed", "watched"}
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DECIMAL_COMMA = "^[+-]?[0-9]+(,[0-9]+)?$"


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A proposed spec, and what of the data decides how to train on them.

    Attributes:
        text: the spec as YAML, with a comment on each column that says why.
        spec: the same.
        rows: of all files; of text that was not read to its end, an estimate by its size.
        ids: distinct ids of each feature with a table, in the rows that were looked at.
        clicked: share of the rows with label 1.
    """

    text: str
    spec: FeatureSpec
    rows: int
    ids: Mapping[str, int]
    clicked: float


def suggest(pattern: str, label: str | None = None) -> Suggestion:
    """A spec for some files, and what they hold.

    Args:
        pattern: files, as for ``shardrec train --data``. The first one is looked at.
        label: the label's column. Default: one of 0 and 1 or of ratings, by its name and values.

    Raises:
        DataError: for a file that cannot be read so, or no column that can be the label or a feature.
    """
    paths = files_of(pattern)
    path = paths[0]
    table, settings = _head(path, label)
    columns = {name: _unwrapped(table[name]) for name in table.column_names if name}
    fields = _fields(columns["ids"]) if file_kind(path) == "svmlight" else {}
    if fields:
        del columns["ids"]
    columns |= {name: array for name, (array, _) in fields.items()}
    label, target = _label(columns, label)
    features: dict[str, _Settings] = {}
    values: dict[str, set[Any]] = {}
    notes, left_out = {}, {}
    for column, array in columns.items():
        if column == label:
            continue
        feature, note, distinct = _feature(column, array)
        if feature is None:
            left_out[column] = note
            continue
        name = re.sub(r"\W+", "_", column).strip("_") or "column"
        while name in features:
            name += "_"
        source: _Settings = {} if name == column else {"column": column}
        if column in fields:
            source = {"column": "ids", "between": [*fields[column][1]]}
        features[name] = {"name": name, **source, **feature}
        missing = f", {array.null_count:,} missing (null, empty or a word of missing:)" if array.null_count else ""
        notes[name], values[name] = note + missing, distinct
    for name, owner in _shared(features, values).items():
        for key in ("vocabulary", "min_count", "rows", "dim"):
            features[name].pop(key, None)
        features[name]["share"] = owner
    lines = [f"# Proposed from {len(table):,} rows of {path}: check the label and the kind per feature."]
    lines += [f"{name}: {flow(value)}" for name, value in settings.items()]
    lines += [f"label: {flow(target)}", "features:"]
    lines += [f"  - {flow(feature)}  # {notes[name]}" for name, feature in features.items()]
    lines += [f"# left out: {flow(column)}: {reason}" for column, reason in left_out.items()]
    if all(feature["kind"] == "dense" for feature in features.values()):
        raise DataError(f"data file {path}: no column but the label has categories or ids, for a table")
    text = "\n".join(lines) + "\n"
    spec = parse_spec(text, "the proposed spec")
    labels = _as_numbers(columns[label])
    return Suggestion(
        text=text,
        spec=spec,
        rows=_rows(paths, table),
        ids={feature.name: len(values[feature.name]) for feature in spec.sparse},
        clicked=float((labels > (spec.label.above or 0)).mean()),
    )


def _rows(paths: Sequence[str], head: pa.Table) -> int:
    """Rows of some files, of whose first one ``head`` was read: by footers, or by bytes as in the head."""
    import pyarrow.parquet as pq

    kind = file_kind(paths[0])
    if kind == "parquet":
        return sum(int(pq.ParquetFile(open_input(path)).metadata.num_rows) for path in paths)
    read = len(text_head(paths[0], _MAX_BYTES))
    first, size = open_input(paths[0]).size(), sum(open_input(path).size() for path in paths)
    bytes_in_all = read * size / first if read < _MAX_BYTES else size * max(1.0, read / first)
    return int(len(head) * max(1.0, bytes_in_all / read))


def flow(value: object) -> str:
    """A value as YAML in one line."""
    import yaml

    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=2**31, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _head(path: str, label: str | None) -> tuple[pa.Table, _Settings]:
    """The first rows as an Arrow table, and what a spec has to say of a text file's form."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import csv

    kind = file_kind(path)
    try:
        if kind == "parquet":
            batches, rows = [], 0
            for batch in pq.ParquetFile(open_input(path)).iter_batches():
                batches.append(batch)
                rows += len(batch)
                if rows >= _MAX_ROWS:
                    break
            return pa.Table.from_batches(batches), {}
        data = text_head(path, _MAX_BYTES)
        data = data[: data.rfind(b"\n") + 1] or data
        if kind == "svmlight":
            table = parse_svmlight(pa.array(data.splitlines(), pa.binary()))[0]
            return pa.table({"label": table["label"].cast(pa.string()).cast(pa.float64()), "ids": table["ids"]}), {}
        usual, line = usual_delimiter(path), data.partition(b"\n")[0].decode("utf-8-sig", errors="replace")
        delimiter = usual if usual in line else max(",\t;| ", key=line.count)
        names = [name.strip(" ") for name in next(standard_csv.reader([line], delimiter=delimiter), [])]
        settings: _Settings = {} if delimiter == usual else {"delimiter": delimiter}
        headless = label not in names and any(map(_NUMBER.fullmatch, names))
        if headless:
            names = settings["columns"] = [f"column_{number}" for number in range(1, len(names) + 1)]
        if len(names) < 2 or len({*names}) < len(names) or (delimiter != usual and "::" in line):
            raise DataError(
                f"data file {path} begins with the line {line[:60]!r}: give it different names of columns, or none, "
                "and one character between them. shardrec sequences takes interactions with '::' between their columns"
            )
        options = {
            "read_options": csv.ReadOptions(column_names=names, skip_rows=int(not headless), block_size=len(data) + 1),
            "parse_options": csv.ParseOptions(
                delimiter=delimiter, newlines_in_values=True, invalid_row_handler=lambda row: "skip"
            ),
        }
        of_values = {
            "null_values": ["", *FeatureSpec.model_fields["missing"].default],
            "strings_can_be_null": True,
        }
        table = csv.read_csv(pa.BufferReader(data), convert_options=csv.ConvertOptions(**of_values), **options)
        if any(map(_has_decimal_commas, table.columns)) and not any(map(pa.types.is_floating, table.schema.types)):
            settings["decimal"] = ","
            of_values["decimal_point"] = ","
            table = csv.read_csv(pa.BufferReader(data), convert_options=csv.ConvertOptions(**of_values), **options)
        return table, settings
    except (pa.ArrowException, EOFError, OSError, lzma.LZMAError) as error:
        reason = str(error).splitlines()[0]
        raise DataError(
            f"data file {path} cannot be read ({reason}): give Parquet, text of columns, plain or .gz, .xz, .bz2 or "
            ".zst, or LIBSVM's text"
        ) from error


def _fields(ids: pa.Array) -> dict[str, tuple[pa.Array, tuple[int, int]]]:
    """Of lists of k ids each, those at each place and their range, if no two ranges overlap; else nothing."""
    import pyarrow.compute as pc

    lengths = pc.unique(pc.list_value_length(ids)).to_pylist()
    if len(lengths) != 1 or not 2 <= (lengths[0] or 0) <= _FEW:
        return {}
    arrays = {f"field_{place + 1}": pc.list_element(ids, place) for place in range(lengths[0])}
    try:
        bounds = {name: pc.min_max(array.cast("int64")) for name, array in arrays.items()}
    except ValueError:  # an id that is no number
        return {}
    order = sorted(bounds, key=lambda name: bounds[name]["min"].as_py())
    if any(bounds[low]["max"].as_py() >= bounds[high]["min"].as_py() for low, high in pairwise(order)):
        return {}
    # Up to the next range: more ids may come in rows that were not looked at.
    starts = [0, *(bounds[name]["min"].as_py() for name in order[1:]), 2 * bounds[order[-1]]["max"].as_py() + 1]
    ranges = dict(zip(order, pairwise(starts), strict=True))
    return {name: (array, ranges[name]) for name, array in arrays.items()}


def _has_decimal_commas(column: pa.ChunkedArray | pa.Array) -> bool:
    """Whether all values are texts of numbers, some of them with a comma before the fraction."""
    import pyarrow.compute as pc

    if not is_text(column.type) or not pc.any(pc.match_substring(column, ",")).as_py():
        return False
    return bool(pc.all(pc.match_substring_regex(column, _DECIMAL_COMMA)).as_py())


def _unwrapped(column: pa.ChunkedArray) -> pa.Array:
    import pyarrow as pa

    array = plain(column)
    if pa.types.is_floating(array.type):  # whole numbers with missing ones, as pandas has them
        numbers = array.drop_null().to_numpy()
        if np.isfinite(numbers).all() and (numbers == np.floor(numbers)).all() and (np.abs(numbers) < 2**53).all():
            return array.cast(pa.int64())
    return array


def _words(name: str) -> list[str]:
    words: list[str] = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower())
    return words


def _names_ids(column: str) -> bool:
    """Such as ``item_id`` and ``item``, and not ``item_price``."""
    words = _words(column)
    return not (_IDS.isdisjoint(words) and _THINGS.isdisjoint(words[-1:]))


def _label(columns: dict[str, pa.Array], label: str | None) -> tuple[str, object]:
    """The label's column, and what the spec says of it."""
    if label is not None and label not in columns:
        raise DataError(f"there is no column {label!r} (--label): the columns are {', '.join(map(repr, columns))}")
    numeric = {
        name: np.unique(_as_numbers(array))
        for name, array in columns.items()
        if name == (label or name) and is_number(array.type)
    }
    binary = [name for name, values in numeric.items() if values.tolist() in ([0, 1], [-1, 1])]
    rated = [name for name, values in numeric.items() if 2 <= len(values) <= _FEW + 1]
    candidates = [name for name in binary if _LABELS.intersection(_words(name))] or [
        name for name in rated if _RATINGS.intersection(_words(name))
    ]
    # Of rows that were all clicked, for a model that draws the others.
    clicked = (name for name, values in numeric.items() if values.tolist() == [1])
    ones = [name for name in clicked if label or _LABELS.intersection(_words(name))]
    candidates = candidates or (binary if len(binary) == 1 else []) or ones or [name for name in rated if label]
    if not candidates:
        for name, array in columns.items():
            texts = array.drop_null().unique().to_pylist() if is_text(array.type) else []
            if len(texts) == 2 and (name == label or (label is None and _LABELS.intersection(_words(name)))):
                raise DataError(
                    f"column {name!r} has the texts {texts[0]!r} and {texts[1]!r}: write 0 and 1, for a label"
                )
        which = f"column {label!r} has no two numbers or more" if label else "no column is clearly the label"
        raise DataError(
            f"{which}: name one of 0 and 1, or of ratings (--label COLUMN), or make interactions without a label to "
            f"histories (shardrec sequences). The columns are {', '.join(map(repr, columns))}"
        )
    name, values = candidates[0], numeric[candidates[0]]
    if values.tolist() in ([0, 1], [1]):
        return name, name
    numbers = _as_numbers(columns[name])
    limits = [float(low + high) / 2 for low, high in pairwise(values)]
    return name, {"column": name, "above": min(limits, key=lambda limit: abs((numbers > limit).mean() - 0.5))}


def _as_numbers(array: pa.Array) -> NDArray[np.float64]:
    """The values but nulls as float64, a truth value as 0 or 1."""
    import pyarrow as pa

    array = array.drop_null()
    array = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    numbers: NDArray[np.float64] = array.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _feature(column: str, array: pa.Array) -> tuple[_Settings | None, str, set[Any]]:
    """What a spec says of a column but its name, or None to leave it out; why; and the distinct ids."""
    import pyarrow as pa
    import pyarrow.compute as pc

    rows, words = len(array), _words(column)
    array = array.drop_null()
    listed, kind, more = array, "id", _Settings()
    if _has_decimal_commas(array):
        return None, "its numbers have decimal commas, and those of other columns points: write points", set()
    if pa.types.is_nested(array.type):
        listed, kind = array.flatten(), "multi_hot"
    elif is_text(array.type) and (separator := _separator(array)):
        listed, kind, more = pc.split_pattern(array, separator).flatten(), "multi_hot", {"separator": separator}
    distinct = set(listed.unique().to_pylist())
    count, of_each = len(distinct), len(listed) / max(1, len(array))
    if count < 2:
        return None, "it has no two values", distinct
    if kind != "id":
        if pa.types.is_floating(listed.type):
            return None, "its lists are of fractions: to weight ids, give these weights: and kind: weighted", distinct
        if _IN_ORDER.intersection(words) or of_each > 10:
            kind, more = "sequence", {**more, "max_length": 50}
    elif pa.types.is_temporal(array.type):
        days = array.cast(pa.timestamp("us")).cast(pa.int64()).to_numpy() / 86_400e6
        return _dense(days), "days since 1970-01-01", distinct
    elif pa.types.is_floating(array.type):
        return _dense(array.to_numpy()), f"from {min(distinct):.4g} to {max(distinct):.4g}", distinct
    elif pa.types.is_integer(array.type) and count > _FEW and not _names_ids(column):
        low, high = min(distinct), max(distinct)
        if high < 2**31 and count <= (high - low + 1) / 2:  # ids fill their range, or are hashes
            return _dense(array.to_numpy()), f"from {low:,} to {high:,}", distinct
    if kind == "id" and count > max(_FEW, 0.95 * rows):
        return None, "almost each row has a value of its own", distinct
    if count > _MANY:
        size: _Settings = {"rows": 10 ** len(str(2 * count)) // (5 if str(2 * count)[0] == "1" else 1)}
    else:
        least = 2 if len(listed) > count else 1  # where no value occurs twice, 2 would leave none
        size = {"vocabulary": "from_data", "min_count": least, **({"dim": 8} if count <= _FEW else {})}
    note = f"{count:,} values" + (f", {of_each:.1f} a row" if kind != "id" else "")
    return {"kind": kind, **size, **more}, note, distinct


def _separator(array: pa.Array) -> str:
    """What is between the ids of a text. Empty for texts of one."""
    import pyarrow.compute as pc

    for mark in "|;, ":
        if pc.mean(pc.match_substring(array, mark)).as_py() < 0.2:
            continue
        marks, spaced = (pc.sum(pc.count_substring(array, text)).as_py() for text in (mark, f"{mark} "))
        separator = f"{mark} " if marks == spaced and mark != " " else mark
        parts = pc.split_pattern(array, separator).flatten().unique()
        numbers = mark != " " or pc.all(pc.match_substring_regex(parts, "^[0-9]*$")).as_py()
        if numbers and len(parts) < len(array.unique()):
            return separator
    return ""


def _dense(values: NDArray[np.float64] | NDArray[np.int64]) -> _Settings:
    log = values.min() >= 0 and values.max() > 20 * max(float(np.median(values)), 1.0)
    numbers = np.log(values + 3.0) if log else values.astype(np.float64)
    scaled = {"mean": float(f"{numbers.mean():.6g}"), "std": float(f"{numbers.std():.4g}") or 1.0}
    return {"kind": "dense", **({"transform": "log"} if log else {}), **scaled}


def _shared(features: dict[str, _Settings], values: dict[str, set[Any]]) -> dict[str, str]:
    """For each sequence whose ids are those of another feature, the feature."""
    shared = {}
    values = {name: {*map(str, values[name])} for name, feature in features.items() if feature["kind"] != "dense"}
    for name, feature in features.items():
        alike = {
            other: (not {*_words(name)}.isdisjoint(_words(other)), overlap)
            for other in features
            if feature["kind"] == "sequence" and features[other]["kind"] == "id"
            for overlap in [len(values[name] & values[other]) / len(values[name] | values[other])]
            if overlap > 0.3
        }
        if alike:
            shared[name] = max(alike, key=lambda other: alike[other])
    return shared
