"""The Gowalla example: its reader, batches, loss and protocol against naive ones, and that its recipe learns."""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from examples.gowalla import main as gowalla
from examples.gowalla.batches import BatchSampler, Graph
from examples.gowalla.data import Dataset, Interactions, read_dataset
from examples.gowalla.evaluate import Metrics, evaluate, recall_and_ndcg, top_items
from examples.gowalla.main import Settings, Trainer
from examples.gowalla.model import LightGCN, sampled_softmax
from shardrec.errors import ConfigError, DataError

Rows = Sequence[Sequence[int]]

NEIGHBOR_WEIGHT = 2.0
TINY = Settings(epochs=8, users_per_batch=40, num_negatives=30, dim=16, cut="row_wise", eval_every=8)


def interactions(rows: Rows, num_items: int) -> Interactions:
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    items = torch.tensor([item for row in rows for item in row], dtype=torch.int64)
    return Interactions(offsets=offsets, items=items, num_items=num_items)


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int]:
    """Train and test rows of a few users, and the number of items."""
    num_items = draw(st.integers(2, 12))
    train, test = [], []
    for _ in range(draw(st.integers(1, 6))):
        items = draw(st.permutations(range(num_items)))
        seen = draw(st.integers(1, num_items))
        train.append(items[:seen])
        test.append(items[seen : seen + draw(st.integers(0, 5))])
    return train, test, num_items


def towns(users: int = 120, count: int = 10, places: int = 16) -> Dataset:
    """Users visit places of their own town only: half of them in train, a quarter in test."""
    generator = torch.Generator().manual_seed(1)
    train, test = [], []
    for user in range(users):
        order = (torch.randperm(places, generator=generator) + places * (user % count)).tolist()
        train.append(order[: places // 2])
        test.append(order[places // 2 : 3 * places // 4])
    return Dataset(train=interactions(train, count * places), test=interactions(test, count * places))


def write(folder: Path, dataset: Dataset) -> None:
    folder.mkdir()
    for half in ("train", "test"):
        rows: Interactions = getattr(dataset, half)
        lines = []
        for user in range(rows.num_users):
            items, _ = rows.of(torch.tensor([user]))
            lines.append(" ".join(map(str, [user, *items.tolist()])))
        (folder / f"{half}.txt").write_text("\n".join(lines) + "\n")


def popularity_recall(dataset: Dataset) -> float:
    users = torch.arange(dataset.train.num_users)
    scores = dataset.train.popularity().float().repeat(len(users), 1)
    recall, _ = recall_and_ndcg(top_items(scores, dataset.train, users, k=20), dataset.test, users)
    return recall.mean().item()


def pairs_of(rows: Interactions) -> list[tuple[int, int]]:
    items, lengths = rows.of(torch.arange(rows.num_users))
    users = torch.arange(rows.num_users).repeat_interleave(lengths)
    return list(zip(users.tolist(), items.tolist(), strict=True))


def own_ids(nodes: KeyedJaggedTensor, num_users: int) -> tuple[tuple[list[int], list[int]], list[list[int]]]:
    """The users and the items of some nodes, and the neighbors of each node."""
    users, items = ([bag.tolist() for bag in nodes[name].to_dense()] for name in ("user", "item"))
    own = users[:num_users] + items[num_users:]
    assert {len(bag) for bag in own} <= {1}
    ids = [bag[0] for bag in own]
    return (ids[:num_users], ids[num_users:]), items[:num_users] + users[num_users:]


def naive_vectors(model: LightGCN, rows: Rows, without: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Vectors of users and items with all interactions but one; degrees count that one, too."""
    user, item = (model.tables.embedding_bags[name].weight.detach() for name in ("user", "item"))
    pairs = [(one, other) for one, items in enumerate(rows) for other in items]
    users, items = user.clone(), item.clone()
    for one, other in pairs:
        visits = sum(place == other for _, place in pairs)
        if (one, other) != without:
            weight = NEIGHBOR_WEIGHT * (len(rows[one]) * visits) ** -0.5
            users[one] += weight * item[other]
            items[other] += weight * user[one]
    return users, items


def naive_metrics(scores: Tensor, train: Rows, test: Rows, k: int) -> Metrics:
    recalls, ndcgs = [], []
    for user, wanted in enumerate(test):
        if not wanted:
            continue
        rest = [item for item in range(scores.shape[1]) if item not in train[user]]
        first = sorted(rest, key=lambda item: -scores[user, item].item())[:k]
        gain = sum(1 / math.log2(place + 2) for place, item in enumerate(first) if item in wanted)
        best = sum(1 / math.log2(place + 2) for place in range(min(k, len(wanted))))
        recalls.append(len(set(first) & set(wanted)) / len(wanted))
        ndcgs.append(gain / best)
    users = len(recalls)
    return Metrics(recall=sum(recalls) / max(users, 1), ndcg=sum(ndcgs) / max(users, 1), users=users)


@pytest.mark.parametrize("compressed", [False, True])
def test_reads_plain_and_compressed_files(tmp_path: Path, compressed: bool) -> None:
    for half, text in {"train": "2 1 0\n0 3\n\n", "test": "0 1\n1\n2 4\n"}.items():
        if compressed:
            (tmp_path / f"{half}.txt.xz").write_bytes(lzma.compress(text.encode()))
        else:
            (tmp_path / f"{half}.txt").write_text(text)
    dataset = read_dataset(tmp_path)
    assert dataset.train.offsets.tolist() == [0, 1, 1, 3]
    assert dataset.train.items.tolist() == [3, 1, 0]
    assert dataset.test.counts().tolist() == [1, 0, 1]
    assert dataset.train.num_items == dataset.test.num_items == 5
    assert dataset.train.popularity().tolist() == [1, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("train", "test", "message"),
    [
        ("0 1\n1 2 x\n", "0 3\n", r"train\.txt:2: field 3 is 'x'"),
        ("0 1\n1 -2\n", "0 3\n", r"train\.txt:2: field 2 is '-2'"),
        ("0 1\n", "0 3\n1 ٣\n", r"test\.txt:2: field 2"),
        ("0 1\n", f"0 {2**31}\n", r"test\.txt:1: field 2 is 2147483648"),
        ("0 1\n0 2\n", "0 3\n", r"train\.txt:2: user 0 has a line already"),
        ("0 1 2 1\n", "0 3\n", r"train\.txt:1: item 1 stands twice"),
        ("0 1 2\n", "0 3 2\n", r"user 0 has item 2 in train\.txt and in test\.txt"),
        ("0\n", "0 3\n", r"train\.txt has no interactions"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, train: str, test: str, message: str) -> None:
    (tmp_path / "train.txt").write_text(train, encoding="utf-8")
    (tmp_path / "test.txt").write_text(test, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_dataset(tmp_path)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"neither train\.txt\.xz nor train\.txt"):
        read_dataset(tmp_path)
    (tmp_path / "train.txt.xz").write_bytes(lzma.compress(b"0 1 2\n")[:-20])
    with pytest.raises(DataError, match=r"train\.txt\.xz: cannot be decompressed"):
        read_dataset(tmp_path)


@given(split=splits(), data=st.data())
def test_items_of_users(split: tuple[list[list[int]], list[list[int]], int], data: st.DataObject) -> None:
    train, _, num_items = split
    users = data.draw(st.lists(st.integers(0, len(train) - 1), max_size=8))
    items, lengths = interactions(train, num_items).of(torch.tensor(users, dtype=torch.int64))
    assert items.tolist() == [item for user in users for item in train[user]]
    assert lengths.tolist() == [len(train[user]) for user in users]


@given(split=splits())
def test_transposed_and_held_out_interactions(split: tuple[list[list[int]], list[list[int]], int]) -> None:
    rows, _, num_items = split
    train = interactions(rows, num_items)
    turned = train.transposed()
    assert pairs_of(turned) == sorted((item, user) for user, item in pairs_of(train))
    assert (turned.num_users, turned.num_items) == (num_items, len(rows))
    halves = train.hold_out(0.3)
    assert sorted(pairs_of(halves.train) + pairs_of(halves.test)) == sorted(pairs_of(train))
    assert halves.train.num_users == halves.test.num_users == len(rows)
    assert pairs_of(train.hold_out(0.3).test) == pairs_of(halves.test)


@given(split=splits())
def test_nodes_hold_themselves_and_their_neighbors(split: tuple[list[list[int]], list[list[int]], int]) -> None:
    rows, _, num_items = split
    users, items = torch.arange(len(rows)).flip(0), torch.arange(num_items)
    nodes = Graph(interactions(rows, num_items), neighbor_weight=NEIGHBOR_WEIGHT).nodes(users, items)
    own, neighbors = own_ids(nodes, len(rows))
    assert own == (users.tolist(), items.tolist())
    visitors = [[user for user, places in enumerate(rows) if item in places] for item in items.tolist()]
    assert neighbors == [rows[user] for user in users.tolist()] + visitors


@given(split=splits(), world_size=st.integers(1, 3), users_per_batch=st.integers(1, 4), seed=st.integers(0, 9))
def test_an_epoch_deals_each_user_once(
    split: tuple[list[list[int]], list[list[int]], int], world_size: int, users_per_batch: int, seed: int
) -> None:
    rows, _, num_items = split
    train = interactions(rows, num_items)
    dealt: list[int] = []
    for rank in range(world_size):
        sampler = BatchSampler(
            Graph(train, neighbor_weight=NEIGHBOR_WEIGHT),
            users_per_batch=users_per_batch,
            num_negatives=3,
            rank=rank,
            world_size=world_size,
            seed=seed,
        )
        batches = list(sampler.epoch())
        assert len(batches) == sampler.steps
        for batch in batches:
            (users, candidates), _ = own_ids(batch.nodes, batch.num_users)
            assert len(users) <= users_per_batch
            assert batch.positives.tolist() == [len(rows[user]) for user in users]
            assert len(set(candidates)) == len(candidates)
            pairs = [(user, item) for user in users for item in rows[user]]
            assert [users[row] for row in batch.rows.tolist()] == [user for user, _ in pairs]
            assert [candidates[column] for column in batch.columns.tolist()] == [item for _, item in pairs]
            dealt += users
    assert sorted(dealt) == list(range(len(rows)))


def test_inclusion_is_how_often_an_item_is_a_candidate() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.multinomial(1 / torch.arange(1, 41.0), 4, generator=generator).tolist() for _ in range(200)]
    train = interactions(rows, 40)
    sampler = BatchSampler(Graph(train, neighbor_weight=NEIGHBOR_WEIGHT), users_per_batch=4, num_negatives=5)
    seen, expected = torch.zeros(40), torch.zeros(40)
    batches = [batch for _ in range(4) for batch in sampler.epoch()]
    for batch in batches:
        (_, candidates), _ = own_ids(batch.nodes, batch.num_users)
        seen[candidates] += 1 / len(batches)
        expected[candidates] = batch.log_inclusion.exp()
    # 200 batches: four standard deviations of a share are at most 0.142.
    assert (seen - expected).abs().max() < 0.15
    assert expected.max() - expected.min() > 0.3


def cosine(one: Tensor, other: Tensor) -> float:
    return (one @ other / (one.norm() * other.norm())).item()


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_loss_is_the_weighted_cross_entropy_of_items_left_out(balance: float) -> None:
    """A positive's cosine is that of a model which pools over all interactions but this one."""
    rows = [[0, 2, 3], [1, 2]]
    train = interactions(rows, 6)
    sampler = BatchSampler(Graph(train, neighbor_weight=NEIGHBOR_WEIGHT), users_per_batch=2, num_negatives=40)
    batch = sampler.batch(torch.tensor([0, 1]))
    (_, candidates), _ = own_ids(batch.nodes, 2)
    torch.manual_seed(0)
    model = LightGCN(2, 6, dim=4, scale=1.0)
    loss = sampled_softmax(*model(batch.nodes, 2), batch, temperature=0.2, balance=balance)
    user_vectors, item_vectors = naive_vectors(model, rows)
    total = weight = 0.0
    for user, items in enumerate(rows):
        logit = {item: cosine(user_vectors[user], item_vectors[item]) / 0.2 for item in candidates}
        inclusion = {item: batch.log_inclusion[column].exp().item() for column, item in enumerate(candidates)}
        others = sum(math.exp(logit[item]) / inclusion[item] for item in candidates if item not in items)
        for item in items:
            left_users, left_items = naive_vectors(model, rows, without=(user, item))
            gain = math.exp(cosine(left_users[user], left_items[item]) / 0.2)
            total -= len(items) ** (balance - 1) * math.log(gain / (gain + others))
            weight += len(items) ** (balance - 1)
    assert loss.item() == pytest.approx(total / weight, rel=1e-4)


@pytest.mark.parametrize(("users", "num_items"), [([], 3), ([0], 1)])
def test_loss_without_anything_to_learn_is_zero(users: list[int], num_items: int) -> None:
    """No users, or no item that the user has not."""
    train = interactions([[0], [0]], num_items)
    sampler = BatchSampler(Graph(train, neighbor_weight=NEIGHBOR_WEIGHT), users_per_batch=2, num_negatives=2)
    batch = sampler.batch(torch.tensor(users, dtype=torch.int64))
    model = LightGCN(2, num_items, dim=4, scale=1.0)
    loss = sampled_softmax(*model(batch.nodes, len(users)), batch, temperature=0.1, balance=0.5)
    loss.backward()
    assert loss.item() == 0
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_metrics_by_hand() -> None:
    """Three items of four found at places 1 and 3, and one of one at place 2, of two that count."""
    test = interactions([[5, 6, 7, 8], [1]], 10)
    recall, ndcg = recall_and_ndcg(torch.tensor([[7, 0, 5], [0, 1, 2]]), test, torch.tensor([0, 1]))
    assert recall.tolist() == [0.5, 1.0]
    best = 1 + 1 / math.log2(3) + 1 / math.log2(4)
    assert ndcg.tolist() == pytest.approx([(1 + 0.5) / best, 1 / math.log2(3)])


def test_items_of_train_come_last() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 2.0], [1.0, 2.0, 3.0, 4.0]])
    top = top_items(scores, interactions([[0], [], [3, 2]], 4), torch.tensor([0, 2]), k=2)
    assert top.tolist() == [[1, 2], [1, 0]]


@given(split=splits(), k=st.integers(1, 5), chunk=st.integers(1, 4))
def test_evaluation_agrees_with_a_naive_one(
    split: tuple[list[list[int]], list[list[int]], int], k: int, chunk: int
) -> None:
    train, test, num_items = split
    assume(any(test))
    dataset = Dataset(train=interactions(train, num_items), test=interactions(test, num_items))
    torch.manual_seed(0)
    model = LightGCN(len(train), num_items, dim=4, scale=1.0)
    users, items = (torch.nn.functional.normalize(vectors) for vectors in naive_vectors(model, train))
    scores = users @ items.t() + 0.3 * dataset.train.popularity().clamp(min=1).log()
    graph = Graph(dataset.train, neighbor_weight=NEIGHBOR_WEIGHT)
    metrics = evaluate(model, graph, dataset.test, prior=0.3, k=k, chunk=chunk)
    naive = naive_metrics(scores, train, test, k)
    assert metrics.users == naive.users
    assert (metrics.recall, metrics.ndcg) == pytest.approx((naive.recall, naive.ndcg))


def test_recipe_learns_and_repeats() -> None:
    dataset = towns()
    results = []
    for _ in range(2):
        trainer = Trainer(dataset, TINY)
        losses = [loss for _ in range(TINY.epochs) for loss, _ in trainer.steps()]
        assert losses[-1] < 0.5 * losses[0]
        results.append(trainer.evaluate())
    assert results[0] == results[1]
    assert results[0].users == 120
    assert results[0].recall > 0.9
    assert popularity_recall(dataset) < 0.3


def test_two_ranks_learn_and_agree(ranks: Callable[..., list[Any]]) -> None:
    def learn() -> tuple[Metrics, int]:
        trainer = Trainer(towns(users=121), TINY, rank=dist.get_rank(), world_size=2)
        samples = sum(positives for _ in range(TINY.epochs) for _, positives in trainer.steps())
        return trainer.evaluate(), samples

    (first, first_samples), (second, second_samples) = ranks(2, learn)
    assert first == second
    assert first.users == 121
    assert first.recall > 0.9
    assert first_samples + second_samples == 121 * 8 * TINY.epochs


def test_command_writes_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write(tmp_path / "gowalla_m1", towns(users=20))
    out = tmp_path / "run" / "metrics.json"
    small = ["--users-per-batch", "10", "--num-negatives", "10", "--dim", "8", "--epochs", "3", "--eval-every", "2"]
    gowalla.main(["--data", str(tmp_path), "--out", str(out), *small])
    report = json.loads(out.read_text())
    assert report["settings"]["dim"] == 8
    assert report["world_size"] == 1
    assert [record["epoch"] for record in report["evaluations"]] == [2, 3]
    assert report["evaluations"][-1]["users"] == 20
    assert "Recall@20" in capsys.readouterr().out


def test_validation_leaves_test_unread(tmp_path: Path) -> None:
    write(tmp_path / "city", towns(users=20))
    (tmp_path / "city" / "test.txt").unlink()
    dataset = read_dataset(tmp_path / "city", validate=0.25)
    assert dataset.train.offsets[-1] + dataset.test.offsets[-1] == 160
    assert 20 < dataset.test.offsets[-1] < 60


@pytest.mark.slow
def test_servers_train_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    write(tmp_path / "gowalla_m1", towns())
    small = [
        "--users-per-batch",
        "40",
        "--num-negatives",
        "30",
        "--dim",
        "16",
        "--epochs",
        "8",
        "--data",
        str(tmp_path),
    ]
    recalls = []
    for servers in ([], ["--servers", "2"], ["--servers", "2", "--staleness", "2"]):
        gowalla.main([*small, *servers, "--out", str(tmp_path / "metrics.json")])
        recalls.append(json.loads((tmp_path / "metrics.json").read_text())["evaluations"][-1]["recall"])
    assert recalls[1] == pytest.approx(recalls[0], abs=1e-6)
    assert recalls[2] > 0.9


@pytest.mark.parametrize(
    ("name", "value"),
    [("servers", -1), ("staleness", 2), ("epochs", 0), ("lr", 0.0), ("temperature", math.nan), ("validate", 1.0)],
)
def test_settings_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{name} is"):
        Settings(**{name: value})  # type: ignore[arg-type]
