"""The flight record: a ring of the last collectives, which other processes of the host read."""

from __future__ import annotations

import os
import pickle

import pytest

from shardrec.errors import PeerError
from shardrec.exchange.flight_record import FlightRecord, flight_record


def test_the_last_collectives_in_order() -> None:
    record = FlightRecord()
    numbers = [record.begin(f"exchange {number}", 8 * number) for number in range(40)]
    for number in numbers[:39]:
        record.end(number)
    entries = record.entries()
    assert [entry.number for entry in entries] == list(range(24, 40))
    assert [(entry.what, entry.size) for entry in entries] == [(f"exchange {n}", 8 * n) for n in range(24, 40)]
    assert all(entry.ended >= entry.began for entry in entries[:-1])
    assert "done" in str(entries[-2])
    assert "#39 exchange 39 (312 bytes): under way for 0." in str(entries[-1])


def test_the_end_of_what_is_no_longer_there_changes_nothing() -> None:
    record = FlightRecord()
    old = record.begin("old")
    for _ in range(16):
        record.begin("new")
    record.end(old)
    assert [entry.ended for entry in record.entries()] == [0.0] * 16


def test_long_names_are_cut() -> None:
    record = FlightRecord()
    record.begin("é" * 40)
    assert record.entries()[0].what.startswith("é" * 16)


def test_another_process_reads_it_and_a_child_has_its_own() -> None:
    record = flight_record()
    number = record.begin("before the fork")
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        read = any(one.what == "before the fork" for one in FlightRecord.of_process(os.getppid(), record.descriptor))
        os.write(there, bytes([read, len(flight_record().entries())]))
        os._exit(0)
    assert os.read(here, 2) == bytes([1, 0])
    os.waitpid(child, 0)
    os.close(here)
    os.close(there)
    record.end(number)
    assert FlightRecord.of_process(child, record.descriptor) == []


def test_the_error_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(PeerError("rank 0: it failed", [1, 3], "save")))
    assert (str(error), error.ranks, error.waited_for) == ("rank 0: it failed", (1, 3), "save")
    with pytest.raises(RuntimeError, match="it failed"):
        raise error
