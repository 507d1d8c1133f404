"""``Ingester``: a topic as a folder of Parquet files, each of which says how far the topic is read by then.

::

    topic ─ kafka.py ─► records ─ records.py ─► objects ─ request.py ─► rows, of texts ─► topic-000000000042.parquet

A file gets its name when it is complete, and what follows the last file is read again after a kill: no record is lost
or repeated. Numbers of files have no gaps, so that a reader notices files that were removed before it read them.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe, util
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardrec import ConfigError, DataError, ShardrecError
from shardrec.files import UnreachableError, os_fault, parse_json, replacing
from shardrec.launch import check_extra, end_with_launcher, spawn_alone
from shardrec.trainer.data.kafka import Place, Topic
from shardrec.trainer.data.records import decoder_of
from shardrec.trainer.data.request import named_spec, table_of
from shardrec.trainer.data.spec import FeatureSpec
from shardrec.trainer.data.urls import open_input, path_of

ROUND = 1 << 16
"""Most records of a file."""

_GROUP = 1 << 12
"""Records of a row group."""

_NAME = re.compile(r"topic-(\d{12})\.parquet")
_KEY = b"shardrec.topic"


class Ingester:
    """Writes the records of a topic to a folder. One ingester at a time does, from where the last one ended.

    Args:
        url: of the topic.
        spec: of the features, by whose names a record has them. The files have the columns.
        folder: made if it is not there.
        skips: whether records that are no rows, or are gone, are left out and counted, in place of an error.
        keep: bytes of files, after which the oldest are removed. None for no bound.

    Attributes:
        lag: records that the topic had for later files when it was read last.
        left_out: records that were left out since the last file, by reason.

    Raises:
        DataError, ConfigError: for another URL or spec, or a folder that has the rows of another topic.
        UnreachableError: if another ingester writes to the folder.
    """

    def __init__(
        self, url: str, spec: FeatureSpec, folder: Path, *, skips: bool = False, keep: int | None = None
    ) -> None:
        self._url, self._folder, self._skips, self._keep = url, folder, skips, keep
        self._columns = columns_of_records(url, spec)
        self._spec, self._topic = named_spec(spec), Topic(url)
        self._decode = decoder_of(self._topic.options)
        self.lag = 0
        self.left_out = Counter[str]()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise DataError(f"{os_fault(error)}. Give a folder to write to") from error
        try:
            self._next, self._places = self._begun()
        except DataError:
            self.close()
            raise

    def _begun(self) -> tuple[int, dict[int, Place]]:
        """The number of the next file, and where the topic goes on."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            where = f"another ingester writes to {self._folder}"
            raise UnreachableError(f"{where}: end it, or give another folder") from None
        except OSError:  # the file system has no locks
            pass
        files = [str(path) for path in self._files()]
        if not files:
            return 0, {}
        noted = _noted(files[-1])
        if noted.get("topic") != self._topic.name:
            raise DataError(f"{files[-1]} is of topic {noted.get('topic')}, not of {self._url}: give another folder")
        return number_of(files[-1]) + 1, {int(number): Place(*place) for number, place in noted["places"].items()}

    def close(self) -> None:
        """Let another ingester write to the folder."""
        os.close(self._lock)

    def write(self, most: int = ROUND) -> tuple[Path, int] | None:
        """Write at most ``most`` of the records that have come as the next file. Returns it and its rows, if any.

        Raises:
            DataError: for what cannot be read or written.
            UnreachableError: for what may be read later: the next call goes on as if this one had not been.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        read = self._topic.read(self._places, most, skips=self._skips)
        tables, left_out = list[pa.Table](), Counter(self.left_out)
        left_out["record that is gone"] += read.gone
        for start in range(0, len(read.records), _GROUP):
            records = read.records[start : start + _GROUP]
            table, faults = table_of([self._decode(record.value) for record in records], self._spec, labelled=True)
            for number, fault in faults.items():
                if not self._skips:
                    where = f"{self._url}: partition {records[number].partition}, offset {records[number].offset}"
                    raise DataError(f"{where}: {fault}, or leave such records out (--on-bad-row skip)")
                left_out[fault.reason.value] += 1
            records = [record for number, record in enumerate(records) if number not in faults]
            table = table.rename_columns([self._columns[name] for name in table.column_names])
            table = table.append_column("_partition", pa.array([each.partition for each in records], pa.int32()))
            tables.append(table.append_column("_offset", pa.array([each.offset for each in records], pa.int64())))
        written, count = None, sum(map(len, tables))
        if count:
            written = self._folder / f"topic-{self._next:012}.parquet", count
            noted = {"topic": self._topic.name, "places": read.places, "left_out": +left_out}
            try:
                with (
                    replacing(written[0], ".part", sync=True) as partial,
                    pq.ParquetWriter(partial, tables[0].schema, compression="zstd") as writer,
                ):
                    writer.write_table(pa.concat_tables(tables), row_group_size=_GROUP)
                    writer.add_key_value_metadata({_KEY: json.dumps(noted)})
                os.fsync(self._lock)  # the folder, so that the name stays
                self._remove_oldest()
            except OSError as error:
                raise DataError(f"{os_fault(error)}. Make room, or give another folder") from error
            self._next, left_out = self._next + 1, Counter()
        self.lag, self._places, self.left_out = read.lag, read.places, +left_out
        return written

    def _files(self) -> list[Path]:
        return sorted(path for path in self._folder.iterdir() if number_of(path.name) >= 0)

    def _remove_oldest(self) -> None:
        """Keep to the bound in bytes. The newest file stays, for it says where to go on."""
        sizes = {path: path.stat().st_size for path in self._files()}
        for path in list(sizes)[:-1]:
            if self._keep is None or sum(sizes.values()) <= self._keep:
                break
            path.unlink()
            del sizes[path]


def columns_of_records(url: str, spec: FeatureSpec) -> dict[str, str]:
    """The column of each field of a record, by the names that :func:`table_of` gives fields.

    Raises:
        ConfigError: if two fields have one name or one column.
        DataError: for a URL that is no topic, or a schema that cannot be read.
        VersionError: without the extras that reading the topic needs.
    """
    check_extra("kafka")
    decoder_of(Topic(url).options)
    plain = (*spec.label_sources, *filter(None, (spec.group, spec.event_time)))
    fields = [(name, name) for name in dict.fromkeys(plain)]
    for feature, named in zip(spec.features, named_spec(spec).features, strict=True):
        fields.append((feature.name, feature.source))
        fields += [(str(named.weights), str(feature.weights))] if feature.weights else []
    for names in zip(*fields, strict=True):
        for name, count in Counter(names).items():
            if count > 1:
                raise ConfigError(
                    f"the features (--features) have {count} fields or columns {name!r}, and a record has one "
                    "for each feature, label, group and event time: rename them (name:, column:)"
                )
    return dict(fields)


def number_of(path: str) -> int:
    """The number of an ingester's file; -1 of another file."""
    match = _NAME.fullmatch(path_of(path).rpartition("/")[2])
    return int(match[1]) if match else -1


def left_out_of(path: str) -> Mapping[str, int]:
    """The records that an ingester left out before it wrote a file, by reason. None of another file."""
    return dict(_noted(path).get("left_out", {})) if number_of(path) >= 0 else {}


def _noted(path: str) -> Mapping[str, Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_input(path) as file:
            return dict(parse_json((pq.read_metadata(file).metadata or {}).get(_KEY, b"{}")))
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"{path} is damaged ({error}): copy it again; or remove it, and its records are read again"
        ) from error


class IngestProcess:
    """An ingester in a child process, which ends with this one, and writes a file each time that it is asked to.

    Args: as of :class:`Ingester`.

    Attributes:
        lag, left_out: of the ingester, at its last answer.
    """

    def __init__(self, url: str, spec: FeatureSpec, folder: Path, *, skips: bool) -> None:
        self._url, self._ingester = url, (url, spec, folder, skips)
        self._pipe: Connection | None = None
        self._is_asked = False
        self.lag, self.left_out = 0, Counter[str]()

    def ask(self) -> None:
        """Have the next file written, while this process does something else until it waits."""
        if self._pipe is None:
            self._pipe, theirs = Pipe()
            with theirs:
                process = spawn_alone(_answer, theirs, *self._ingester, name="ingester")
            util.Finalize(None, process.kill, exitpriority=1)
        self._is_asked = True
        with suppress(OSError):  # it was ended, as the wait will tell
            self._pipe.send(None)

    def wait(self) -> None:
        """Wait until the file that was asked for is there, or the topic had no further records.

        Raises:
            DataError, UnreachableError: of the ingester; also if it was ended: the next file is asked of another one.
        """
        if self._pipe is None or not self._is_asked:
            return
        self._is_asked = False
        try:
            said = self._pipe.recv()
        except (EOFError, OSError):
            self._pipe.close()
            self._pipe = None
            raise UnreachableError(f"the process that reads {self._url} was ended: it is started again") from None
        if isinstance(said, ShardrecError):
            raise said
        self.lag, self.left_out = said


def _answer(requests: Connection, url: str, spec: FeatureSpec, folder: Path, skips: bool) -> None:
    """The main function of the child process."""
    end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which ends this process
    ingester = None
    with suppress(EOFError, ConnectionError):  # the process that asked has ended
        while True:
            requests.recv()
            try:
                ingester = ingester or Ingester(url, spec, folder, skips=skips)
                ingester.write()
                said: object = ingester.lag, ingester.left_out
            except ShardrecError as error:
                said = error
            requests.send(said)
