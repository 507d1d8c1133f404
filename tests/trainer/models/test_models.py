"""The models of shardrec.trainer.models: sharded as not sharded, in TorchScript, and on data with a known rule."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models import dlrm as torchrec_dlrm
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import shardrec
from shardrec._torchscript import quiet
from shardrec.errors import ConfigError
from shardrec.trainer.data import ClickSchema, criteo_schema
from shardrec.trainer.models import MODELS
from shardrec.trainer.models.parts import BatchNorm, ItemCounts, activation
from shardrec.trainer.models.sequence import Dropout
from shardrec.trainer.run import TrainConfig
from shardrec.trainer.run.losses import with_own_loss
from shardrec.trainer.run.model import build_model, fuse_optimizer
from tests.ranks import ranks

USERS, ITEMS = 24, 31
SCHEMA = ClickSchema(
    dense_names=("age", "price"),
    sparse_names=("user", "history", "tags", "item"),
    num_embeddings=(USERS, ITEMS, 9, ITEMS),
)
WIDTHS = replace(SCHEMA, dims=(8, 24, 4, 24), tables=("t_user", "t_film", "t_tags", "t_film"))
"""With a width for each table, and a table that two features share."""
LONGEST = 7
LR = 0.1

REGULAR = {"dropout": 0.2, "batch_norm": True}
SEQUENTIAL: dict[str, Any] = {"max_length": LONGEST, "negatives": 16, "dim": 8, "heads": 2}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dlrm": ("dlrm", {"dim": 8}),
    "dlrm, regularized": ("dlrm", REGULAR),
    "dcn": ("dcn", {"rank": 4, "layers": 3}),
    "dcn, full rank": ("dcn", {"rank": 0, **REGULAR}),
    "dnn": ("dnn", REGULAR),
    "deepfm": ("deepfm", {"hidden": [16], **REGULAR}),
    "finalmlp": ("finalmlp", {"context1": ["user", "tags"], "heads": 4, **REGULAR}),
    "din": ("din", {"attention": [8], **REGULAR}),
    "sasrec": ("sasrec", SEQUENTIAL),
    "hstu": ("hstu", SEQUENTIAL),
    "two_tower": ("two_tower", {"item": ["item", "price"], **REGULAR}),
    "lightgcn": ("lightgcn", {"dim": 24, "neighbor_weight": 2.0, "negatives": 16, "prior": 0.1}),
    "mmoe": ("mmoe", {"experts": 3, "hidden": [16, 8], "tower": [], **REGULAR}),
    "ple": ("ple", {"hidden": [16, 8]}),
}


def made(case: str, schema: ClickSchema = SCHEMA, **changes: Any) -> nn.Module:
    name, arguments = CASES[case]
    with TemporaryDirectory() as folder:
        if name == "lightgcn":  # its users have the items of their own half
            lists = [[item for item in range(1, ITEMS) if item % 2 != user % 2][: user % 9] for user in range(USERS)]
            arguments = {"graph": f"{folder}/graph.parquet", **arguments}
            pq.write_table(pa.table({"user": range(USERS), "history": lists}), arguments["graph"])
        return build_model(TrainConfig(model=name, model_args={**arguments, **changes}), schema)


def batch_of(size: int, seed: int) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """Users like the items of their own half; what they had before is of it, too."""
    draws = torch.Generator().manual_seed(seed)

    def drawn(most: int, count: int) -> Tensor:
        return torch.randint(most, (count,), generator=draws)

    user, item = drawn(USERS, size), 1 + drawn(ITEMS - 1, size)
    many, tags = drawn(LONGEST + 1, size), drawn(3, size)
    row = torch.repeat_interleave(many)
    history = 1 + 2 * drawn((ITEMS - 1) // 2, int(many.sum())) + user[row] % 2
    ids = torch.cat([user, history, drawn(9, int(tags.sum())), item])
    ones = torch.ones_like(user)
    sparse = KeyedJaggedTensor([*SCHEMA.sparse_names], ids, lengths=torch.cat([ones, many, tags, ones]))
    liked = (item - 1) % 2 == user % 2
    labels = torch.where(torch.rand(size, generator=draws) < 0.9, liked, ~liked).float()
    return torch.randn(size, 2, generator=draws), sparse, labels


def off_meta(model: nn.Module) -> nn.Module:
    """The same model, its tables on the CPU, drawn as :func:`shardrec.shard` draws them."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            bags = isinstance(module, EmbeddingBagCollection)
            tables = module.embedding_bag_configs() if bags else module.embedding_configs()
            parent, _, child = name.rpartition(".")
            weighted = {"is_weighted": module.is_weighted()} if bags else {}
            on_cpu = type(module)(tables=tables, device=torch.device("cpu"), **weighted)
            setattr(model.get_submodule(parent), child, on_cpu)
    return model


def loss_of(model: nn.Module, batch: tuple[Tensor, KeyedJaggedTensor, Tensor], seed: int) -> Tensor:
    """The model's own, where it has one; what it draws depends on the seed."""
    dense, sparse, labels = batch
    torch.manual_seed(seed)
    if hasattr(model, "loss"):
        loss: Tensor = model(dense, sparse, labels)
        return loss
    return binary_cross_entropy_with_logits(model(dense, sparse).view(-1), labels)


def against_unsharded(case: str) -> None:
    """On a rank: tables are the schema's; outputs, also scripted and after two steps, are the unsharded model's."""
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    model = made(case, replace(WIDTHS, dims=()) if case == "lightgcn" else WIDTHS)
    reference = copy.deepcopy(model)
    fuse_optimizer(model, TrainConfig(embedding_optimizer="sgd", embedding_lr=LR))
    torch.manual_seed(1)
    sharded = shardrec.shard(model)
    looked_up = {"t_film": (ITEMS, 24)}
    if case == "lightgcn":
        looked_up |= {"t_user": (USERS, 24)}
    elif case not in ("sasrec", "hstu"):
        looked_up |= {"t_user": (USERS, 8), "t_tags": (9, 4)}
    tables = {
        table.name.rpartition(".")[2]: (table.num_embeddings, table.embedding_dim) for table in sharded.plan.tables
    }
    assert tables == looked_up
    torch.manual_seed(1)
    reference = off_meta(reference)
    for name, buffer in reference.named_buffers():
        if "running" in name:  # as if learned
            buffer.uniform_(0.5, 1.5)
            sharded.module.get_buffer(name).copy_(buffer)
    for part in (sharded, reference):
        part.eval()
    batches = [batch_of(size, seed) for seed, size in enumerate((17, 6))]

    def compare() -> Tensor:
        dense, sparse, _ = batches[rank]
        expected: Tensor = reference(dense, sparse)
        torch.testing.assert_close(sharded(dense, sparse), expected, rtol=1e-4, atol=1e-5)
        return expected

    expected = compare()
    with quiet():
        scripted = torch.jit.script(sharded)
    torch.testing.assert_close(scripted(*batches[rank][:2]), expected, rtol=1e-4, atol=1e-5)
    for part in (sharded, reference):
        part.train()
        if hasattr(reference, "loss"):
            with_own_loss(getattr(part, "module", part), case)
        for module in part.modules():
            if isinstance(module, (nn.Dropout, BatchNorm)):
                module.eval()
    dense = torch.optim.SGD([{"params": sharded.dense_parameters()}], lr=LR)  # there may be none
    whole = torch.optim.SGD(reference.parameters(), lr=LR)
    for step in (2, 4):
        dense.zero_grad()
        whole.zero_grad()
        loss_of(sharded, batches[rank], step + rank).backward()
        (sum(loss_of(reference, batch, step + turn) for turn, batch in enumerate(batches)) / 2).backward()  # type: ignore[union-attr]
        dense.step()
        whole.step()
    sharded.eval()
    reference.eval()
    assert not torch.equal(compare(), expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("case", CASES)
def test_sharded_is_unsharded(case: str) -> None:
    ranks(2, against_unsharded, case)


def auc(scores: Tensor, labels: Tensor) -> float:
    above = scores[labels == 1].unsqueeze(1) > scores[labels == 0]
    return float(above.float().mean())


@pytest.mark.some(1)
@pytest.mark.parametrize("case", CASES)
def test_learns(case: str) -> None:
    torch.manual_seed(0)
    model = shardrec.shard(made(case))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        dense, sparse, labels = batch_of(256, step)
        optimizer.zero_grad()
        binary_cross_entropy_with_logits(model(dense, sparse).view(-1), labels).backward()
        optimizer.step()
    model.eval()
    dense, sparse, labels = batch_of(2000, 99)
    with torch.no_grad():
        # Of the rule itself: 0.9. Histories tell it, but for those that are empty, one in eight.
        assert auc(model(dense, sparse).view(-1), labels) > (0.75 if case in ("sasrec", "hstu") else 0.85)


@pytest.mark.parametrize(("name", "size"), [("dlrm", 3), ("dcn", 3), ("dcn", 0)])
def test_defaults_are_those_of_older_runs(name: str, size: int) -> None:
    """TorchRec's module with the same options: names, values and outputs, so that their checkpoints load."""
    schema = criteo_schema(max_embeddings=50)
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{feature}", embedding_dim=16, num_embeddings=rows, feature_names=[feature])
        for feature, rows in zip(schema.sparse_names, schema.num_embeddings, strict=True)
    ]
    parts: dict[str, Any] = {
        "embedding_bag_collection": EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        "dense_in_features": 13,
        "dense_arch_layer_sizes": [64, 32, 16],
        "over_arch_layer_sizes": [128, 64, 1],
    }
    cross = {"dcn_num_layers": 2, "dcn_low_rank_dim": 32}
    old = torchrec_dlrm.DLRM_DCN(**parts, **cross) if name == "dcn" else torchrec_dlrm.DLRM(**parts)
    models = [shardrec.shard(old)]
    torch.manual_seed(0)
    models.append(shardrec.shard(build_model(TrainConfig(model=name), schema)))
    states = [model.state_dict() for model in models]
    assert [*states[0]] == [*states[1]]
    sparse = KeyedJaggedTensor(
        [*schema.sparse_names], torch.ones(26 * size, dtype=torch.int64), lengths=torch.ones(26 * size).long()
    )
    if size == 0:
        assert models[1](torch.ones(0, 13), sparse).shape == (0, 1)
        return
    for (key, parameter), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(parameter, other), key
    assert torch.equal(*(model(torch.ones(size, 13), sparse) for model in models))


def test_tables_that_a_sequence_model_cannot_share() -> None:
    shared = replace(SCHEMA, num_embeddings=(ITEMS, ITEMS, 9, ITEMS), tables=("t", "t", "t_tags", "t"))
    with pytest.raises(
        ConfigError, match="feature 'user' shares the table of 'item', which this model looks up without"
    ):
        made("din", shared)
    with pytest.raises(ConfigError, match="dim 4 and 16: give feature 'history' share: item"):
        made("din", replace(SCHEMA, dims=(None, 4, None, None)))


@pytest.mark.parametrize("name", MODELS)
def test_defaults_are_those_of_the_options(name: str) -> None:
    """So an option with its default value gives no argument."""
    module, _, attribute = MODELS[name].partition(":")
    defaults = inspect.signature(getattr(import_module(module), attribute)).parameters
    config = TrainConfig()
    values = {
        "dim": config.model.embedding_dim,
        "dense_layers": config.model.dense_layers,
        "hidden": config.model.over_layers,
    }
    assert {key: defaults[key].default for key in values if key in defaults}.items() <= values.items()


def test_dropout_and_batch_norm_of_hidden_layers_are_there_if_asked_for() -> None:
    for dropout, batch_norm in ((0.0, False), (0.3, False), (0.0, True), (0.3, True)):
        layers = activation(8, dropout, batch_norm)
        assert [layer.p for layer in layers if isinstance(layer, nn.Dropout)] == ([0.3] if dropout else [])
        assert any(isinstance(layer, nn.BatchNorm1d) for layer in layers) == batch_norm


@pytest.mark.parametrize("size", [0, 1])
def test_batch_norm_takes_batches_without_a_variance(size: int) -> None:
    """Such as a rank's part of an epoch's last step."""
    model = shardrec.shard(made("dnn"))
    dense, sparse, _ = batch_of(size, 0)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(dense, sparse).sum().backward()
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_dropout_keeps_a_share_and_the_mean(share: float) -> None:
    torch.manual_seed(0)
    dropout, inputs = Dropout(share), torch.ones(1000, 200, requires_grad=True)
    outputs = dropout(inputs)
    outputs.sum().backward()
    kept = outputs > 0
    assert kept.float().mean().item() == pytest.approx(1 - share, abs=0.005)
    assert kept.float().mean(0).std() < 0.02  # each column alike
    assert torch.allclose(outputs[kept], torch.tensor(1 / (1 - share)))
    assert torch.equal(inputs.grad, outputs)
    assert dropout.eval()(inputs) is inputs


@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_a_history_that_is_too_long(name: str) -> None:
    model = shardrec.shard(made(name, max_length=LONGEST - 1))
    with pytest.raises(RuntimeError, match="more items than the model's max_length"):
        model(*batch_of(50, 0)[:2])


@pytest.mark.parametrize("case", ["din", "sasrec", "lightgcn"])
@pytest.mark.parametrize("items", [(1, 1, 0), (2, 0, 1)])
def test_a_row_without_one_item_gives_no_other_row_its_score(case: str, items: tuple[int, ...]) -> None:
    model = off_meta(made(case)).eval()
    dense, sparse, labels = batch_of(3, 0)
    lengths = torch.cat([sparse.lengths()[:-3], torch.tensor(items)])
    ids = sparse.values()[: int(lengths.sum())]
    broken = KeyedJaggedTensor([*SCHEMA.sparse_names], ids, lengths=lengths)
    model(dense, sparse)
    with pytest.raises(RuntimeError, match="a row lacks an item, or has several"):
        model(dense, broken)
    if case == "sasrec":
        with pytest.raises(RuntimeError, match="a row lacks an item, or has several"):
            model.loss(dense, broken, labels)


@pytest.mark.parametrize(
    ("case", "arguments", "message"),
    [
        ("dnn", {"dropuot": 0.1}, "'dropuot', which model 'dnn' does not take: did you mean 'dropout'"),
        ("dnn", {"dropout": 1.5}, "dropout is 1.5: Input should be less than 1"),
        ("dnn", {"hidden": "wide"}, "hidden is 'wide': Input should be a valid tuple"),
        ("din", {"history": "nobody"}, "lacks a feature 'nobody' with a table. Its features are 'user'"),
        ("din", {"item": "tags"}, "'history' and 'tags' share a table and have 31 and 9 rows"),
        ("sasrec", {"heads": 3}, "dim is 8 and heads is 3"),
        ("finalmlp", {"heads": 5}, "multiple of 5 heads"),
        ("finalmlp", {"context1": ["age"]}, r"name \['age'\], which are not features"),
        ("two_tower", {"item": ["price", "item"]}, "the item's id first"),
        ("lightgcn", {"graph": "none.parquet"}, "graph=FILE.* is 'none.parquet'.*Give the training data"),
        ("lightgcn", {"item": "tags"}, "numbers of .* are above the features' rows"),
        ("dlrm", {"hidden": []}, r"dlrm\(schema, dim=8, hidden=\(\)\) fails"),
    ],
)
def test_arguments_that_do_not_fit(case: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(case, **arguments)


@pytest.mark.parametrize("inside", [False, True])
def test_exporting_a_sharded_model_names_the_function_that_can(inside: bool) -> None:
    model = shardrec.shard(made("dnn")).eval()
    exported = nn.Sequential(model) if inside else model
    with pytest.raises(ConfigError, match=r"cannot trace a ShardedModel: use shardrec\.export\(model"):
        torch.export.export(exported, (torch.ones(2, 2),))


SKEWED: dict[str, tuple[str, dict[str, Any]]] = {
    "sasrec, uniform": ("sasrec", {"sampling": "uniform"}),
    "sasrec, popularity": ("sasrec", {"sampling": "popularity"}),
    "hstu, batch": ("hstu", {"sampling": "batch"}),
    "two_tower, log_q": ("two_tower", {"item": ["item"], "log_q": True}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(("case", "corrected"), [*((case, True) for case in SKEWED), ("sasrec, popularity", False)])
def test_negatives_that_are_popular_are_corrected_for(
    case: str, corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Items by a power law, whoever the user is: logits that differ as the logs of the items' probabilities."""
    if not corrected:
        monkeypatch.setattr(ItemCounts, "log_q", lambda counts, ids: torch.zeros(ids.shape))
    name, arguments = SKEWED[case]
    given = arguments if name == "two_tower" else {**SEQUENTIAL, "dropout": 0.0, **arguments}
    torch.manual_seed(0)
    model = shardrec.shard(with_own_loss(build_model(TrainConfig(model=name, model_args=given), SCHEMA), name))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    odds = torch.arange(1, ITEMS).float() ** -1.5

    def skewed(size: int) -> tuple[Tensor, KeyedJaggedTensor]:
        dense, sparse, _ = batch_of(size, 1)
        values, count = sparse.values().clone(), int(sparse["history"].values().numel())
        for start, number in ((size, count), (values.numel() - size, size)):
            values[start : start + number] = 1 + torch.multinomial(odds, number, replacement=True)
        return torch.zeros_like(dense), KeyedJaggedTensor(sparse.keys(), values, lengths=sparse.lengths())

    for _ in range(150):
        optimizer.zero_grad()
        dense, sparse = skewed(128)
        model(dense, sparse, torch.ones(128)).backward()
        optimizer.step()
    model.eval()
    dense, sparse = skewed(ITEMS - 1)
    values = sparse.values().clone()
    values[-(ITEMS - 1) :] = torch.arange(1, ITEMS)
    same_user = KeyedJaggedTensor(sparse.keys(), values, lengths=sparse.lengths())
    with torch.no_grad():
        queries, items = model.query_vectors(dense, same_user), model.item_vectors(dense, same_user)
    fit = torch.corrcoef(torch.stack([(queries.mean(0) * items).sum(1)[:15], odds.log()[:15]]))[0, 1]
    assert (fit > 0.9) == corrected, fit


@pytest.mark.some(1)
@pytest.mark.parametrize("case", [case for case in SKEWED if "uniform" not in case])
def test_counts_of_items_are_the_first_ranks_and_take_batches_without_rows(case: str) -> None:
    def rank_main() -> tuple[list[float], list[int]]:
        name, arguments = SKEWED[case]
        given = arguments if name == "two_tower" else {**SEQUENTIAL, **arguments}
        torch.manual_seed(0)
        model = shardrec.shard(with_own_loss(build_model(TrainConfig(model=name, model_args=given), SCHEMA), name))
        losses = []
        for rows in (20, 0, 20):
            loss = model(*batch_of(rows * (1 + torch.distributed.get_rank()), 3))
            loss.backward()
            losses.append(float(loss))
        model.eval()
        counts: list[int] = model.get_buffer("counts.counts").tolist()
        return losses, counts

    (losses, counts), (_, others) = ranks(2, rank_main)
    assert losses[1] == 0 < losses[0]
    assert ITEMS < sum(counts) < sum(others)


@pytest.mark.parametrize("case", ["hstu, batch", "two_tower, log_q"])
def test_a_batch_without_another_item_has_no_loss(case: str) -> None:
    name, arguments = SKEWED[case]
    given = arguments if name == "two_tower" else {**SEQUENTIAL, **arguments}
    model = shardrec.shard(with_own_loss(build_model(TrainConfig(model=name, model_args=given), SCHEMA), name))
    sparse = KeyedJaggedTensor([*SCHEMA.sparse_names], torch.tensor([3, 7, 5]), lengths=torch.tensor([1, 1, 0, 1]))
    loss = model(torch.zeros(1, 2), sparse, torch.ones(1))
    loss.backward()
    assert float(loss) == 0
    assert all(torch.isfinite(one.grad).all() for one in model.parameters() if one.grad is not None)
