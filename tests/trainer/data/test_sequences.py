"""``shardrec sequences``: interactions in any form against a naive reading, and the files of a split."""

from __future__ import annotations

import json
import lzma
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardrec.errors import ConfigError, DataError
from shardrec.trainer.data import load_spec
from shardrec.trainer.data.formats import _Opened
from shardrec.trainer.data.interactions import Columns, read_interactions
from shardrec.trainer.data.sequences import write_sequences

FORMS = {
    "header.csv": (",", True, {}),
    "names.csv": (",", True, {"user": "who", "item": "what", "time": "when"}),
    "ratings.dat": ("::", False, {"user": "1", "item": "2", "time": "4"}),
    "rows.tsv": ("\t", False, {"user": "1", "item": "2", "time": "4"}),
    "semicolons.txt.xz": (";", True, {}),
    "columns.parquet": ("", True, {}),
}


def prepare(path: Path, out: Path, columns: Columns | None = None, **options: Any) -> dict[str, int]:
    return write_sequences(read_interactions(str(path), columns or Columns()), out, **options)


def rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.read_table(path).to_pylist())


def listed(path: Path, columns: Columns, core: int = 1) -> dict[Any, list[Any]]:
    """Each user's items."""
    read = read_interactions(str(path), columns).core(core)
    users, items = read.user_ids.to_pylist(), read.item_ids.to_pylist()
    found: dict[Any, list[Any]] = {user: [] for user in users}
    for user, item in zip(read.user_N.tolist(), read.item_N.tolist(), strict=True):
        found[users[user]].append(items[item])
    return found


@given(
    events=st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(1, 5), st.integers(0, 30)), min_size=3, max_size=40
    ),
    form=st.sampled_from([*FORMS]),
    as_texts=st.booleans(),
    dates=st.booleans(),
    above=st.sampled_from([None, 2.5]),
)
def test_every_form_has_the_same_interactions(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[tuple[int, int, int, int]],
    form: str,
    as_texts: bool,
    dates: bool,
    above: float | None,
) -> None:
    events.append((6, 10, 5, 0))  # so that some rating is above
    separator, header, names = FORMS[form]
    path = tmp_path_factory.mktemp("raw") / form
    users, items = (
        [f"{mark}{event[place]}" if as_texts else event[place] for event in events]
        for mark, place in (("u", 0), ("i,", 1))
    )
    if as_texts and separator not in (",", ""):
        items = [item.replace(",", " ") for item in items]
    ratings, times = (
        [event[2] for event in events],
        [f"2020-01-{1 + event[3]:02}" if dates else event[3] for event in events],
    )
    heads = (
        ("who", "what", "stars", "when")
        if "user" in names and header
        else ("userId", "movie_id", "rating", "timestamp")
    )
    if form.endswith(".parquet"):
        pq.write_table(pa.table(dict(zip(heads, (users, items, ratings, times), strict=True))), path, row_group_size=7)
    else:
        fields = [heads] * header + [*zip(users, items, ratings, times, strict=True)]
        lines = (separator.join(f'"{of}"' if "," in str(of) else str(of) for of in line) for line in fields)
        text = "".join(f"{line}\n" for line in lines).encode()
        path.write_bytes(lzma.compress(text) if form.endswith(".xz") else text)
    rating = None if above is None or (header and "user" not in names) else "3"
    columns = Columns(**names, rating=rating, above=above)
    expected: dict[Any, list[Any]] = {}
    kept = [place for place in range(len(events)) if above is None or ratings[place] > above]
    for place in sorted(kept, key=lambda place: times[place] if dates else events[place][3]):
        expected.setdefault(users[place], []).append(items[place])
    assert listed(path, columns) == expected
    least = 2
    while True:  # the core, by its definition
        counts = Counter(item for of_user in expected.values() for item in of_user)
        fewer = {user: [item for item in of_user if counts[item] >= least] for user, of_user in expected.items()}
        fewer = {user: of_user for user, of_user in fewer.items() if len(of_user) >= least}
        if fewer == expected:
            break
        expected = fewer
    if expected:
        assert listed(path, columns, core=least) == expected
    else:
        with pytest.raises(DataError, match="give a lower --core"):
            listed(path, columns, core=least)


@given(text=st.text("ab:", max_size=60), size=st.integers(1, 7), delimiter=st.sampled_from(["::", ":a:", "ab"]))
def test_a_delimiter_of_several_characters_is_found_wherever_a_block_ends(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int, delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("raw") / "x.txt"
    path.write_text(f"{text}.")
    opened, found = _Opened(str(path), delimiter=delimiter), b""
    while data := opened.read(size):
        assert len(data) <= max(size, len(delimiter))
        found += data
    assert found == f"{text}.".replace(delimiter, "\x1f").encode()


HEADED = b"user,item,rating,timestamp\n1,10,5,100\n1,11,4,200\n2,10,3,50\n"


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (HEADED, {"header": False, "user": "1", "item": "2"}, "has a header, 'user,item,rating,timestamp': leave --no"),
        (b"a,b,c,d\n1,10,5,1\n1,11,4,2\n", {"header": False}, "has a header, 'a,b,c,d'"),
        (HEADED[27:], {}, r"has 4 columns, 1, 2, 3, 4 and no header \(its first line is '1,10,5,100'\): say which"),
        (
            HEADED[27:],
            {"header": True},
            "has numbers or dates in its first line '1,10,5,100', as rows have: give --no-header",
        ),
        (b"ann,x\nbob,y\n", {}, "is its first line 'ann,x' a header. Give --header or --no-header"),
        (b"uid,asin,z\n1,2,3\n", {"item": "product"}, r"has no column 'product' \(--item\): it has uid, asin, z"),
        (b"a,b,c\n1,2,3\n1,2,3\n", {}, "has 3 columns, a, b, c: say which of them has the user"),
        (b"user,date,time,item\n1,2,3,4\n", {}, "say which of them has the time"),
        (HEADED, {"item": "1"}, "column 'user' is there, or is named, twice"),
        (HEADED.replace(b"200", b"noon"), {}, "x.csv:3: field 'timestamp': value 'noon' is no date and time"),
        (HEADED.replace(b"1,11", b"1,"), {}, "x.csv:3: field 'item' has no value"),
        (HEADED.replace(b"1,11", b",11"), {}, "x.csv:3: field 'user': value None is no id of a group"),
        (HEADED.replace(b",4,", b",x,"), {"above": 1.0}, "x.csv:3: field 'rating': value 'x' is not a number"),
        (HEADED.replace(b",4,", b",4,4,"), {}, "x.csv:3: the line has 5 of 4 columns"),
        (HEADED, {"above": 9.0}, "have no interactions: give others, or a lower --above"),
        (b"1 2 3\n1 4 5 6\n", {"separator": ","}, "has lines without ',', such as '1 2 3': give --separator"),
        (b"1 2 3 4\n2 4 5\n", {"user": "1", "item": "2"}, "the line has 3 of 4 columns"),
        (b"u1\t2020-01-02T03:04:05Z\tx\nu2\t2020-01-02T03:04:05Z\ty\n", {}, "has 3 columns, 1, 2, 3 and no header"),
        (b"1\n2\n", {}, "has lines without '::' or .* such as '1': give --separator TEXT"),
        (b"\xff\xfe", {}, "has lines without"),
    ],
)
def test_a_file_that_would_be_misunderstood_is_refused(
    tmp_path: Path, text: bytes, columns: dict[str, Any], message: str
) -> None:
    (tmp_path / "x.csv").write_bytes(text)
    with pytest.raises(DataError, match=message):
        read_interactions(str(tmp_path / "x.csv"), Columns(**columns))


def test_rows_that_are_left_out_are_counted(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(HEADED + b"3,,1,1\n4,5\n4,7,1,never\n5,6,1,2\n")
    read = read_interactions(str(tmp_path / "x.csv"), Columns(), skips=True)
    assert (read.left_out, read.user_ids.to_pylist()) == (3, [1, 2, 5])


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    seed=st.integers(0, 99),
    as_texts=st.booleans(),
    unseen=st.booleans(),
)
def test_the_split(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], seed: int, as_texts: bool, unseen: bool
) -> None:
    draws = np.random.default_rng(seed)
    drawn = {user: draws.integers(0, 90, size).tolist() for user, size in enumerate([3, *lengths], 7)}
    drawn[3] = [*range(100, 190)]  # so that there is something that nobody else has
    folder = tmp_path_factory.mktemp("games")
    sequences = {user: [f"i{item}" if as_texts else item for item in items] for user, items in drawn.items()}
    lines = "".join(f"{user} {item}\n" for user, items in sequences.items() for item in items)
    (folder / "all.txt.xz").write_bytes(lzma.compress(lines.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrec.trainer.data.sequences._VALUES_AT_ONCE", int(draws.integers(1, 2000)))
        columns = Columns(header=False)
        counts = prepare(folder / "all.txt.xz", folder, columns, users=4, candidates=5, unseen=unseen, seed=seed)
    ids = sorted({item for items in sequences.values() for item in items})
    spec = load_spec(folder / "features.yaml")
    assert [feature.values for feature in spec.features] == [tuple(map(str, ids))] * 2
    train = {user: items if len(items) < 3 else items[:-2] for user, items in sequences.items()}
    found = {row["user"]: (row["history"], row["item"], row["label"]) for row in rows(folder / "train.parquet")}
    assert found == {user: (items[:-1][-50:], items[-1], 1) for user, items in train.items() if len(items) > 1}
    assert counts["train"] == len(found)
    assert {row["user"]: row["history"] for row in rows(folder / "users.parquet")} == sequences
    users = {}
    for name, ahead in (("valid", 2), ("test", 1)):
        ranked = rows(folder / f"{name}.parquet")
        assert counts[name] == len(ranked)
        users[name] = [row["user"] for row in ranked[::6]]
        for start, user in zip(range(0, len(ranked), 6), users[name], strict=True):
            group = ranked[start : start + 6]
            assert [row["label"] for row in group] == [1, 0, 0, 0, 0, 0]
            assert {row["user"] for row in group} == {user}
            assert all(row["history"] == sequences[user][:-ahead][-50:] for row in group)
            assert group[0]["item"] == sequences[user][-ahead]
            assert not {row["item"] for row in group[1:]} & set((sequences if unseen else train)[user])
            assert {row["item"] for row in group} <= {*ids}
    eligible = {user for user, items in sequences.items() if len(items) >= 3}
    assert users["valid"] == users["test"]
    assert len(set(users["valid"])) == min(4, len(eligible))
    assert set(users["valid"]) <= eligible


@given(seed=st.integers(0, 99), unseen=st.booleans(), popular=st.booleans(), candidates=st.integers(0, 3))
def test_the_split_by_time(
    tmp_path_factory: pytest.TempPathFactory, seed: int, unseen: bool, popular: bool, candidates: int
) -> None:
    draws, folder = np.random.default_rng(seed), tmp_path_factory.mktemp("timed")
    events = [(int(draws.integers(1, 9)), int(draws.integers(1, 40)), int(draws.integers(60))) for _ in range(200)]
    lines = "".join(f"{user},{item},{time}\n" for user, item, time in events)
    (folder / "all.csv").write_text(lines, encoding="utf-8")
    columns = Columns(user="1", item="2", time="3")
    options: dict[str, Any] = {"split": "time", "unseen": unseen, "popular": popular, "candidates": candidates}
    prepare(folder / "all.csv", folder, columns, seed=seed, **options)
    cuts = [*np.quantile([time for _, _, time in events], [0.8, 0.9]), math.inf]
    of_user: dict[int, list[tuple[int, int]]] = {}
    for user, item, time in sorted(events, key=lambda event: event[2]):
        of_user.setdefault(user, []).append((item, time))
    train = {user: [item for item, time in pairs if time < cuts[0]] for user, pairs in of_user.items()}
    found = {row["user"]: [*row["history"], row["item"]] for row in rows(folder / "train.parquet")}
    assert found == {user: items[-51:] for user, items in train.items() if len(items) > 1}
    for name, begin, end in (("valid", *cuts[:2]), ("test", *cuts[1:])):
        ranked = rows(folder / f"{name}.parquet")
        assert [row["label"] for row in ranked] == [1, *[0] * candidates] * (len(ranked) // (1 + candidates))
        expected = {}
        for user, pairs in of_user.items():
            before = [item for item, time in pairs if time < begin]
            after = [item for item, time in pairs if begin <= time < end]
            if before and after:
                expected[user] = (before[-50:], after[0])
        assert {row["user"]: (row["history"], row["item"]) for row in ranked if row["label"]} == expected
        others = [(row["user"], row["item"]) for row in ranked if not row["label"]]
        known = {user: {item for item, _ in pairs} for user, pairs in of_user.items()} if unseen else train
        assert not any(item in known[user] for user, item in others)
        if popular:
            assert {item for _, item in others} <= {item for items in train.values() for item in items}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a x\na y\na z\nb x\n", {}, "no user with two training items"),
        ("1 2\n1 3\n", {}, "no user with three items"),
        ("1 1\n1 2\n1 3\n1 2\n1 3\n", {}, "a user has 3 items of 3: none is left to rank. Give --candidates 0"),
        ("1 2 5\n1 3 5\n", {"split": "time"}, "no user with items before and in the valid part"),
    ],
)
def test_files_that_cannot_be_split(tmp_path: Path, text: str, options: dict[str, Any], message: str) -> None:
    (tmp_path / "all.txt").write_text(text)
    columns = Columns(user="1", item="2", time="3" if options else None, header=False)
    with pytest.raises(DataError, match=message):
        prepare(tmp_path / "all.txt", tmp_path, columns, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["all.txt"]


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "all.txt").write_text("1 2\n1 3\n1 4\n1 5\n2 6\n", encoding="utf-8")
    prepare(tmp_path / "all.txt", tmp_path, candidates=1)
    assert json.loads((tmp_path / "vocabularies.json").read_text()) == {"item": ["2", "3", "4", "5", "6"]}
    with pytest.raises(ConfigError, match=r"features.yaml would be written over: give another folder"):
        prepare(tmp_path / "all.txt", tmp_path, candidates=1)


def test_lists_of_items_are_rows_of_items(tmp_path: Path) -> None:
    histories: dict[str, list[Any]] = {"user": [5, 3, 9], "item": [["b", "a"], [], ["c"]], "time": [[2, 1], [], [7]]}
    pq.write_table(pa.table(histories | {"age": [1, 2, 3]}), tmp_path / "lists.parquet")
    assert listed(tmp_path / "lists.parquet", Columns()) == {5: ["a", "b"], 9: ["c"]}
    pq.write_table(pa.table(histories | {"time": [1, 2, 3]}), tmp_path / "times.parquet")
    assert listed(tmp_path / "times.parquet", Columns()) == {5: ["b", "a"], 9: ["c"]}
    pq.write_table(pa.table(histories | {"time": [[1], [], [7]]}), tmp_path / "uneven.parquet")
    with pytest.raises(DataError, match="'item' and 'time' have lists of different lengths"):
        read_interactions(str(tmp_path / "uneven.parquet"), Columns())
