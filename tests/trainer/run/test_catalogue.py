"""Ranking among all items: the sharded model's places are those of the whole score matrix, for every cut."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec.errors import ConfigError
from shardrec.ids import DynamicIds
from shardrec.trainer.data import ClickBatch, ClickMetrics, Feature, FeatureSpec, ranking_metrics
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run import catalogue as catalogue_file
from shardrec.trainer.run.catalogue import Catalogue, Seen
from shardrec.trainer.run.catalogue_ranking import CatalogueRanking
from shardrec.trainer.run.model import build_model
from tests.plans import CUTS, cut_plan, random_plan, topologies_of
from tests.ranks import RankErrors, ranks

USERS, ITEMS, DIM, K = 13, 37, 8, 5
SPEC = FeatureSpec(
    group="user",
    features=(
        Feature(name="user", kind="multi_hot", rows=USERS, ids="number"),
        Feature(name="item", kind="id", rows=ITEMS, ids="number"),
        Feature(name="known", kind="multi_hot", share="item"),
        Feature(name="bought", kind="multi_hot", share="item"),
    ),
)


class Products(nn.Module):
    """Users and items with small whole numbers for coordinates: products are exact, and many are equal."""

    def __init__(self, users_UD: Tensor, items_ND: Tensor) -> None:
        super().__init__()
        self.item_features = ("item",)
        bag = EmbeddingBagConfig(name="u", num_embeddings=USERS, embedding_dim=DIM, feature_names=["user"])
        table = EmbeddingConfig(name="i", num_embeddings=ITEMS, embedding_dim=DIM, feature_names=["item"])
        self.users, self.items = EmbeddingBagCollection([bag]), EmbeddingCollection([table])
        with torch.no_grad():
            self.users.embedding_bags["u"].weight.copy_(users_UD)
            self.items.embeddings["i"].weight.copy_(items_ND)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return (self.query_vectors(dense, sparse) * self.item_vectors(dense, sparse)).sum(1)

    def query_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        vectors: Tensor = self.users(sparse)["user"]
        return vectors

    def item_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        vectors: Tensor = self.items(sparse)["item"].values()
        return vectors


def drawn(rng: Random) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Tables, and rows: users, items, labels and numbers of known items; a user may have an item twice."""
    draws = torch.Generator().manual_seed(rng.randrange(2**31))
    users_UD, items_ND = (torch.randint(-1, 2, (rows, DIM), generator=draws).float() for rows in (USERS, ITEMS))
    count = rng.randint(1, 40)
    users, items = torch.randint(USERS, (count,), generator=draws), torch.randint(1, ITEMS, (count,), generator=draws)
    labels = (torch.rand(count, generator=draws) < 0.7).float()
    labels[0] = 1
    return users_UD, items_ND, users, items, labels, torch.randint(0, ITEMS // 3, (count,), generator=draws)


def batch_of(users: Tensor, items: Tensor, labels: Tensor, sizes: Tensor | None = None) -> ClickBatch:
    """Each row's known items are some multiples of 3, maybe its own, and 0; those that it bought are its own."""
    ones, sizes = torch.ones_like(users), torch.zeros_like(users) if sizes is None else sizes
    known = torch.cat([3 * torch.arange(size) for size in sizes.tolist()] or [sizes])
    sparse = KeyedJaggedTensor(
        ["user", "item", "known", "bought"],
        torch.cat([users, items, known, items]),
        lengths=torch.cat([ones, ones, sizes, ones]),
    )
    return ClickBatch(dense=torch.zeros(len(users), 1), sparse=sparse, labels=labels, groups=users)


def by_score_matrix(drawn: tuple[Tensor, ...]) -> tuple[float, ...]:
    """NDCG, recall, hit rate, AUC and logloss: each user's clicked items beside all others, by the plain metrics."""
    users_UD, items_ND, users, items, labels, _ = drawn
    scores_UN = users_UD @ items_ND.t()
    users, items = users[labels == 1], items[labels == 1]
    clicked_UN = torch.zeros(USERS, ITEMS)
    clicked_UN[users, items] = 1
    own = users.unique()
    groups = own.repeat_interleave(ITEMS - 1)
    expected = ranking_metrics(clicked_UN[own, 1:].view(-1), scores_UN[own, 1:].reshape(-1), groups, K)
    score_B, others_BN = scores_UN[users, items], scores_UN[users, 1:]
    # The clicked item is equal to itself.
    below_B = (others_BN < score_B[:, None]).sum(1) + ((others_BN == score_B[:, None]).sum(1) - 1) / 2
    logloss = float((others_BN.logsumexp(1) - score_B).mean())
    return (expected.ndcg, expected.recall, expected.hit_rate, float(below_B.mean()) / (ITEMS - 2), logloss)


def unseen_by_score_matrix(drawn: tuple[Tensor, ...]) -> tuple[float, float]:
    """Hit rate of single rows and AUC: each row's item beside the others that it does not know."""
    users_UD, items_ND, labels = drawn[0], drawn[1], drawn[4]
    users, items, sizes = (drawn[number][labels == 1] for number in (2, 3, 5))
    scores_BN = users_UD[users] @ items_ND.t()
    item_N = torch.arange(ITEMS)
    is_known_BN = (item_N % 3 == 0) & (item_N < 3 * sizes[:, None])
    others_BN = ~is_known_BN & (item_N > 0) & (item_N != items[:, None])
    score_B1 = scores_BN.gather(1, items[:, None])
    above_B, equal_B = (((scores_BN > score_B1) & others_BN).sum(1), ((scores_BN == score_B1) & others_BN).sum(1))
    hits = (above_B + equal_B < K).double().mean()
    return float(hits), float((1 - (above_B + equal_B / 2) / others_BN.sum(1)).mean())


def top_items(model: nn.Module, batches: list[ClickBatch], k: int) -> list[tuple[ClickBatch, bool, Any]]:
    """The k best items for each of this rank's batches, with what they know left out and without."""
    catalogue = Catalogue(model, SPEC, torch.device("cpu"), purpose="a test", remedy="")
    catalogue.look_up()
    best = []
    for is_seen in (False, True):
        features = ["known", "bought"] if is_seen else []
        queries = catalogue.steps.predict(batches, catalogue.queries)
        for batch, vectors in zip(batches, queries, strict=True):
            best.append((batch, is_seen, catalogue.top(vectors, catalogue.seen(batch, features), k)))
    return best


def by_full_sort(
    users_UD: Tensor, items_ND: Tensor, batch: ClickBatch, k: int, *, leave_out: bool
) -> tuple[Tensor, Tensor]:
    """Rows and scores of each row's items, sorted by score and then by row, filled up to k."""
    users = batch.sparse["user"].values()
    rows, scores = torch.zeros(len(users), k, dtype=torch.int64), torch.full((len(users), k), -torch.inf)
    known = [batch.sparse[name].to_dense() for name in ("known", "bought")]
    for place, user in enumerate(users.tolist()):
        seen = {0, *(item for lists in known for item in lists[place].tolist() if leave_out)}
        score_N = (items_ND @ users_UD[user]).tolist()
        order = sorted((-score, item) for item, score in enumerate(score_N) if item not in seen)[:k]
        rows[place, : len(order)] = torch.tensor([item for _, item in order])
        scores[place, : len(order)] = -torch.tensor([score for score, _ in order])
    return rows, scores + 0.0


def against_score_matrix(world_size: int) -> None:
    rank, rng = (dist.get_rank() if dist.is_initialized() else 0), Random(world_size)
    tables = {"users.u": (USERS, DIM), "items.i": (ITEMS, DIM)}
    for number in range(4 if world_size == 1 else 2 * len(CUTS)):
        topology = rng.choice(topologies_of(world_size))
        cut = [*CUTS][number % len(CUTS)]
        plan = cut_plan(cut, rng, tables, topology) if number < len(CUTS) else random_plan(rng, tables, topology)
        data = drawn(rng)
        model = shardrec.shard(Products(*data[:2]), plan)
        size = rng.randint(1, 9)
        own = [part[rank::world_size] for part in data[2:]]  # the last ranks may have no row
        steps = -(-len(data[2]) // (world_size * size))
        batches = [batch_of(*(part[step * size : (step + 1) * size] for part in own)) for step in range(steps)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalogue_file, "_SCORES", rng.choice([1, 50, 1 << 22]))
            patch.setattr(catalogue_file, "_LOOKED_UP", rng.choice([1, 7, 8192]))
            patch.setattr(catalogue_file, "_BLOCK", rng.choice([1, 5, 8192]))
            metrics = CatalogueRanking(model, SPEC, torch.device("cpu"), k=K)(batches)
            single = [replace(batch, groups=None) for batch in batches]
            unseen = CatalogueRanking(model, SPEC, torch.device("cpu"), k=K, unseen=True)(single)
            k = rng.choice([1, K, ITEMS + 3])
            best = top_items(model, batches, k)
        assert unseen.ranking is not None
        assert (unseen.ranking.hit_rate, unseen.auc) == pytest.approx(unseen_by_score_matrix(data), abs=1e-6)
        assert unseen.logloss == pytest.approx(metrics.logloss)
        assert metrics.ranking is not None
        got = (metrics.ranking.ndcg, metrics.ranking.recall, metrics.ranking.hit_rate, metrics.auc, metrics.logloss)
        assert got == pytest.approx(by_score_matrix(data), abs=1e-6), (number, plan)
        assert metrics.rows == int(data[4].sum())
        for batch, is_seen, (rows, scores) in best:
            expected = by_full_sort(data[0], data[1], batch, k, leave_out=is_seen)
            torch.testing.assert_close((rows, scores), expected, rtol=0, atol=0)


@given(seed=st.integers(0, 2**31), scale=st.sampled_from([1e-20, 1.0, 1e15]), close=st.sampled_from([1e-7, 1e-3, 1.0]))
def test_the_best_items_are_exact_where_float32_would_decide_otherwise(seed: int, scale: float, close: float) -> None:
    """Scores that differ by less than a product in float32 is off by, and equal ones in any block."""
    draws = torch.Generator().manual_seed(seed)
    users_UD, items_ND = (torch.randn(rows, DIM, generator=draws) for rows in (USERS, ITEMS))
    items_ND = scale * (items_ND[:1] + close * items_ND[torch.randint(ITEMS, (ITEMS,), generator=draws)])
    catalogue = Catalogue(Products(users_UD, items_ND), SPEC, torch.device("cpu"), purpose="a test", remedy="")
    catalogue.look_up()
    none = Seen(torch.zeros(USERS, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue_file, "_BLOCK", int(torch.randint(1, ITEMS, (1,), generator=draws)))
        patch.setattr(catalogue_file, "_FIRST", int(torch.randint(1, ITEMS, (1,), generator=draws)))
        rows, scores = catalogue.top(users_UD, none, K)
    exact_UN = (users_UD.double() @ items_ND.double().t()).float()
    for user in range(USERS):
        order = sorted(range(1, ITEMS), key=lambda row, user=user: (-float(exact_UN[user, row]), row))  # type: ignore[misc]
        assert rows[user].tolist() == order[:K]
        assert scores[user].tolist() == exact_UN[user, order[:K]].tolist()


@pytest.mark.some(1)
@pytest.mark.parametrize("world_size", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_any_cut_ranks_as_the_score_matrix(world_size: int) -> None:
    ranks(world_size, against_score_matrix, world_size)


def test_an_unknown_item_comes_after_all_items() -> None:
    items_ND = torch.arange(ITEMS, 0, -1).float().view(-1, 1).expand(-1, DIM)  # row 0 has the highest score
    model = Products(torch.ones(USERS, DIM), items_ND)
    ranking = CatalogueRanking(model, SPEC, torch.device("cpu"), k=1)
    unknown, first = (ranking([batch_of(torch.tensor([3]), torch.tensor([item]), torch.ones(1))]) for item in (0, 1))
    assert unknown.ranking is not None
    assert first.ranking is not None
    assert (unknown.ranking.hit_rate, first.ranking.hit_rate) == (0.0, 1.0)
    assert (unknown.auc, first.auc) == (0.0, 1.0)
    assert first.click_rate == 1 / (ITEMS - 1)


SEQUENCES = FeatureSpec(
    features=(
        Feature(name="history", kind="sequence", rows=ITEMS, ids="number"),
        Feature(name="item", kind="id", rows=ITEMS, ids="number"),
    )
)


def sequences(count: int) -> ClickBatch:
    draws = torch.Generator().manual_seed(count)
    lengths = torch.randint(0, 6, (count,), generator=draws)
    ids = torch.randint(1, ITEMS, (int(lengths.sum()) + count,), generator=draws)
    sparse = KeyedJaggedTensor(["history", "item"], ids, lengths=torch.cat([lengths, torch.ones_like(lengths)]))
    return ClickBatch(dense=torch.zeros(count, 1), sparse=sparse, labels=torch.ones(count))


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("sasrec", {"dim": 8}), ("hstu", {"dim": 8}), ("two_tower", {"hidden": [8], "columns": 4})],
)
def test_model_ranks_as_its_forward_on_every_item(name: str, arguments: dict[str, object]) -> None:
    """On two ranks; and the model is afterwards what it was."""

    def rank_main() -> tuple[ClickMetrics, tuple[float, ...]]:
        torch.manual_seed(0)
        model = shardrec.shard(build_model(TrainConfig(model=name, model_args=arguments), SEQUENCES.schema_))
        own = sequences(5 + dist.get_rank())
        metrics = CatalogueRanking(model, SEQUENCES, torch.device("cpu"), k=K)([own])
        model.eval()
        everything = [sequences(5), sequences(6)]
        scores, clicked = [], []
        for batch in everything:
            for row in range(batch.size):
                ids = batch.sparse["history"].to_dense()[row]
                lengths = torch.cat([torch.full((ITEMS - 1,), len(ids)), torch.ones(ITEMS - 1, dtype=torch.int64)])
                every = torch.arange(1, ITEMS)
                sparse = KeyedJaggedTensor(
                    ["history", "item"], torch.cat([ids.repeat(ITEMS - 1), every]), lengths=lengths
                )
                with torch.no_grad():
                    scores.append(model(torch.zeros(ITEMS - 1, 1), sparse))
                clicked.append(every == batch.sparse["item"].values()[row])
        groups = torch.arange(len(scores)).repeat_interleave(ITEMS - 1)
        expected = ranking_metrics(torch.cat(clicked).float(), torch.cat(scores), groups, K)
        return metrics, (expected.ndcg, expected.recall, expected.hit_rate)

    for metrics, expected in ranks(2, rank_main):
        assert metrics.ranking is not None
        assert (metrics.ranking.ndcg, metrics.ranking.recall, metrics.ranking.hit_rate) == pytest.approx(expected)
        assert metrics.rows == 11


class Failing(Products):
    """Fails on one rank, for its queries."""

    def query_vectors(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        if dist.get_rank() == 1:
            raise ValueError("no vectors today")
        return super().query_vectors(dense, sparse)


def test_a_rank_that_fails_ends_the_ranking_on_all() -> None:
    def rank_main() -> None:
        model = shardrec.shard(Failing(torch.ones(USERS, DIM), torch.ones(ITEMS, DIM)))
        batch = batch_of(torch.tensor([1]), torch.tensor([2]), torch.ones(1))
        CatalogueRanking(model, SPEC, torch.device("cpu"))([batch])

    with pytest.raises(RankErrors) as failed:
        ranks(2, rank_main)
    assert all("no vectors today" in str(error) for error in failed.value.errors.values())


def test_what_cannot_be_ranked() -> None:
    cpu, model = torch.device("cpu"), Products(torch.ones(USERS, DIM), torch.ones(ITEMS, DIM))
    with pytest.raises(ConfigError, match=r"train sasrec .*\(this model has no item_features\)"):
        CatalogueRanking(nn.Linear(1, 1), SPEC, cpu)
    dynamic = FeatureSpec(
        features=(SPEC.features[0], Feature(name="item", kind="id", rows=ITEMS, dynamic_ids=DynamicIds()))
    )
    with pytest.raises(ConfigError, match="dynamic ids of 'item'"):
        CatalogueRanking(model, dynamic, cpu)
    with pytest.raises(ConfigError, match="'unseen' needs a feature with the items of a row that are left out"):
        CatalogueRanking(model, FeatureSpec(features=SPEC.features[:2]), cpu, unseen=True)
    model.item_features = ("item", "price")  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"are \['item', 'price'\]"):
        CatalogueRanking(model, SPEC, cpu)
    model.item_features = ("item",)
    ranking, users = CatalogueRanking(model, SPEC, cpu), torch.tensor([1, 2])
    with pytest.raises(ConfigError, match="no held-out row was clicked"):
        ranking([batch_of(users, users, torch.zeros(2))])
    several = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    with pytest.raises(ConfigError, match="a row has no 'item', or several"):
        ranking([ClickBatch(dense=torch.zeros(1, 1), sparse=several, labels=torch.ones(1))])
    with torch.no_grad():
        model.users.embedding_bags["u"].weight[1] = torch.nan
    with pytest.raises(ConfigError, match="scores of 1 rows are not numbers"):
        ranking([batch_of(users, users, torch.ones(2))])
