"""A store's files are whole, or not there; what cannot be written is named, and nothing of it is left."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from unittest import mock

import pytest

from shardrec.errors import ConfigError
from shardrec.files import Store


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_full_file_system_is_named_and_leaves_nothing(tmp_path: Path, scheme: str) -> None:
    store = Store(f"{scheme}{tmp_path}/scores")
    store.write("a", b"before")
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch("os.fsync", side_effect=full), pytest.raises(ConfigError) as raised:
        store.write("a", b"after")
    assert f"'{scheme}{tmp_path}/scores' cannot be used ({store.folder}/.a.part: No space left" in str(raised.value)
    assert "MiB are free" in str(raised.value)
    assert store.read("a") == b"before"
    assert store.names() == ["a"]
    assert not list(store.folder.glob(".*"))


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path) -> None:
    """Or else, after a loss of power, a part of the scores may be there and empty."""
    store, synced = Store(tmp_path), []

    def sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))

    with mock.patch("os.fsync", sync):
        store.write("a", b"scores")
    assert synced == [(f"{tmp_path}/.a.part", 6)]
    assert store.names() == ["a"]
