"""Records of a topic as rows of the form that :mod:`shardrec.trainer.data.request` takes: of JSON, Avro or Protobuf.

The options of a topic's URL say which, as in ``kafka://host:9092/clicks?format=avro&schema=clicks.avsc``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from decimal import Decimal
from functools import lru_cache
from uuid import UUID

from shardrec import DataError
from shardrec.files import open_regular, parse_json
from shardrec.launch import check_extra
from shardrec.trainer.data.fault import Reason, RowFault

Decode = Callable[[bytes], object]
"""Gives a record's object, or the fault of one that is none."""

_NAMES = {"json": set[str](), "avro": {"schema"}, "protobuf": {"schema", "message"}}


@lru_cache(16)
def decoder_of(options: str) -> Decode:
    """The decoder of a topic's records.

    Args:
        options: of its URL, ``name=value`` with ``&`` between them. ``format``: json (default), avro or protobuf.
            ``schema``: the file with Avro's schema (JSON), or of descriptors that ``protoc --include_imports
            --descriptor_set_out`` writes. ``message``: of these, the full name of the record's. ``schema_id``: of
            records that begin with Confluent's header, the number of the schema that they must have.

    Raises:
        DataError: for other options, or a schema that cannot be read.
        VersionError: without the extra that the format needs.
    """
    settings = dict(option.partition("=")[::2] for option in options.split("&") if option)
    kind = settings.pop("format", "json")
    number = settings.pop("schema_id", None) if kind != "json" else None
    is_number = number is None or (number.isdecimal() and int(number) < 2**32)
    if kind not in _NAMES or settings.keys() != _NAMES[kind] or not all(settings.values()) or not is_number:
        raise DataError(
            f"data (--data) is a topic with the options {options!r}: give format=avro&schema=FILE, or "
            "format=protobuf&schema=FILE&message=NAME, each perhaps with &schema_id=NUMBER; none for JSON"
        )
    if kind == "json":
        return _json
    decode, indexes = (
        _avro(settings["schema"]) if kind == "avro" else _protobuf(settings["schema"], settings["message"])
    )
    header = b"" if number is None else b"\0" + int(number).to_bytes(4, "big") + indexes

    def decode_record(data: bytes) -> object:
        if not data.startswith(header):
            where = f"record {data[:16]!r} does not begin with the header {header!r} of schema_id={number}"
            return RowFault(reason=Reason.OBJECT, where=where, remedy="give that of the topic's records")
        try:
            return _plain(decode(data[len(header) :]))
        except (ArithmeticError, EOFError, LookupError, TypeError, ValueError) as error:
            text = (str(error) or type(error).__name__).splitlines()[0]
            where = f"record {data[:16]!r} is none of {settings['schema']} ({text})"
            return RowFault(reason=Reason.OBJECT, where=where, remedy="correct it")

    return decode_record


def _json(data: bytes) -> object:
    try:
        return parse_json(data)
    except ValueError:
        return data  # which is no object


def _contents(path: str) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def _avro(path: str) -> tuple[Decode, bytes]:
    check_extra("avro")
    from fastavro import parse_schema, schemaless_reader  # an extra
    from fastavro.schema import SchemaParseException, UnknownType  # an extra

    try:
        written = parse_json(_contents(path))
        schema = parse_schema(written)
        _check_ends(written)
    except (AttributeError, LookupError, OSError, SchemaParseException, TypeError, UnknownType, ValueError) as error:
        raise DataError(f"schema {path} is no schema of Avro ({type(error).__name__}: {error}): correct it") from error

    def decode(data: bytes) -> object:
        stream = io.BytesIO(data)
        record = schemaless_reader(stream, schema, None)
        if rest := len(data) - stream.tell():
            raise ValueError(f"{rest} bytes after its end")
        return record

    return decode, b""


def _check_ends(schema: object, inside: frozenset[str] = frozenset(), space: str = "") -> None:
    """Raise a ValueError if a record can hold another one of its own: many levels of them would end the process."""
    match schema:
        case str() if schema in inside or f"{space}.{schema}" in inside:
            raise ValueError(f"record {schema} is within itself")
        case {"type": "record" | "error", "name": str(name), "fields": Sequence() as fields, **more}:
            space = name.rpartition(".")[0] if "." in name else str(more.get("namespace", space) or "")
            full = name if "." in name or not space else f"{space}.{name}"
            for field in fields:
                _check_ends(field["type"], inside | {full}, space)
        case Mapping():
            for part in ("type", "items", "values"):
                _check_ends(schema.get(part), inside, space)
        case Sequence() if not isinstance(schema, str):
            for part in schema:
                _check_ends(part, inside, space)


def _protobuf(path: str, name: str) -> tuple[Decode, bytes]:
    # All of the extra train.
    from google.protobuf import json_format
    from google.protobuf.descriptor_pb2 import FileDescriptorSet
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message import Error
    from google.protobuf.message_factory import GetMessageClass

    pool = DescriptorPool()
    try:
        files = FileDescriptorSet.FromString(_contents(path)).file
        for file in files:
            pool.Add(file)
        described = pool.FindMessageTypeByName(name)
    except (Error, LookupError, OSError, TypeError) as error:
        raise DataError(
            f"schema {path} is no descriptor set with message {name!r} ({error}): write it by protoc --include_imports "
            f"--descriptor_set_out={path}"
        ) from error
    kind, lacking = GetMessageClass(described), {field.name: None for field in described.fields if field.has_presence}

    def decode(data: bytes) -> object:
        try:
            return lacking | json_format.MessageToDict(
                kind.FromString(data),
                preserving_proto_field_name=True,
                always_print_fields_with_no_presence=True,
                descriptor_pool=pool,
            )
        except (Error, json_format.Error) as error:
            raise ValueError(str(error)) from error

    # Which message of its file it is: the number of steps down to it, and each step, as zigzag varints; 0 for [0].
    messages, steps = next(file for file in files if file.name == described.file.name).message_type, []
    for part in name.removeprefix(f"{described.file.package}.").split("."):
        steps.append([message.name for message in messages].index(part))
        messages = messages[steps[-1]].nested_type
    return decode, b"\0" if steps == [0] else b"".join(_varint(2 * step) for step in (len(steps), *steps))


def _varint(number: int) -> bytes:
    return bytes([number]) if number < 128 else bytes([number % 128 + 128]) + _varint(number // 128)


def _plain(value: object) -> object:
    """A value as JSON has it: a date or time as a text, bytes as the text that they are."""
    match value:
        case bytes():
            return value.decode()
        case date() | time():
            return value.isoformat()
        case UUID():
            return str(value)
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case Mapping():
            return {name: _plain(part) for name, part in value.items()}
        case Sequence() if not isinstance(value, str):
            return [_plain(part) for part in value]
    return value
