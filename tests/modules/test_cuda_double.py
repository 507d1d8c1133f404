"""What runs on CUDA, on tensors that only say that they are there: the host waits for the device once a step.

Values and trained weights are those of the same model on the CPU. What a GPU alone can show (its kernels, NCCL,
streams) is in tests/modules/test_cuda.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec import native
from shardrec._torchscript import plain
from shardrec.checkpoint import load_checkpoint, save
from shardrec.errors import InputError, PeerError
from shardrec.exchange import peers
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.lookup import group_shards as bank
from shardrec.modules import ShardedModel, initial, shard
from shardrec.portable.portable_bags import PortableBags
from shardrec.portable.portable_sequences import PortableSequences
from shardrec.trainer.data import ClickBatch, ClickMetrics
from shardrec.trainer.run.held_out import evaluate
from tests.batches import Bags, random_bags, random_sizes_bags
from tests.cuda_double import (
    INTERPRETS_TRITON,
    DeviceTensor,
    cuda_double,
    cuda_is_there,
    to_double,
    value_of,
)
from tests.cuda_double.device import ACTIVE, EventDouble
from tests.models import click_model, collection, feature_rows, random_configs, table_sizes
from tests.modules import sequence_models as sequences
from tests.modules.clicks import CONFIGS, mixed_plan
from tests.plans import cut_plan, random_plan
from tests.ranks import ranks

HEADER, FLAG = "step/id_exchange.py", "exchange/fault_flags.py"


def weights(model: ShardedModel) -> dict[str, Tensor]:
    return {
        name: one.inner if isinstance(one, DeviceTensor) else one.detach() for name, one in model.named_parameters()
    }


def compare(
    make: Callable[[], nn.Module],
    plan: ShardingPlan,
    batches: list[KeyedJaggedTensor],
    *,
    waits: int | None = 1,
    **options: Any,
) -> None:
    """Train on both; from the second step on, the host waits so often (by default once, for the header in forward, or
    for the batch's flag in backward)."""
    on_cpu = shard(make(), plan, transport="group", **options)
    with cuda_double() as double:
        with double.may_wait():
            on_cuda = shard(make(), plan, device="cuda:0", **options)
            given = [to_double(one) for one in batches]
        for step, features in enumerate(given):
            expected = value_of(on_cpu(batches[step]))
            gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(step))
            with double.may_wait():
                there = gradient.to("cuda")
                double.waits.clear()
                found = value_of(on_cuda(features))
                assert found.is_cuda
                (found * there).sum().backward()
                if step and waits is not None:
                    files = [one.partition(":")[0] for one in double.waits]
                    assert files.count(HEADER) + files.count(FLAG) == 1, double.waits
                    assert len(double.waits) <= waits, double.waits
            (expected * gradient).sum().backward()
            assert torch.allclose(found.inner, expected, atol=1e-5)  # type: ignore[attr-defined]
    expected_weights = weights(on_cpu)
    for name, weight in weights(on_cuda).items():
        assert torch.allclose(weight, expected_weights[name], atol=1e-5), name
    for (name, one), (_, other) in zip(on_cuda.named_parameters(), on_cpu.named_parameters(), strict=True):
        if other.grad is not None:
            assert torch.allclose(one.grad.inner, other.grad, atol=1e-2), name  # type: ignore[union-attr]


def bags_of(rng: Random, configs: list[EmbeddingBagConfig], weighted: bool = False) -> list[KeyedJaggedTensor]:
    """Batches of one order of keys, of which one is looked up in no table."""
    found = [
        random_bags(rng, feature_rows(configs), 3, weighted=weighted, extra=["unused"], shuffled=False)
        for _ in range(3)
    ]
    return [one.kjt() for one in found]


@pytest.mark.some(4)
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("cut", ["mixed", "row_wise", "table_wise", "data_parallel"])
def test_pooled(cut: str, optimizer: str) -> None:
    rng = Random(f"{cut} {optimizer}")
    weighted = optimizer == "sgd"
    configs = random_configs(rng, weighted=weighted)
    sizes = table_sizes(configs)
    plan = random_plan(rng, sizes, Topology()) if cut == "mixed" else cut_plan(cut, rng, sizes, Topology())
    # Which ids are of which width is looked up in the backward of replicated tables. Rowwise Adagrad on a table cut by
    # columns looks for distinct rows, and tells the other stripes' holders.
    widths = len({config.embedding_dim for config in configs})
    waits = 1 + widths if cut == "data_parallel" and widths > 1 else 1
    waits = 9 if (cut, optimizer) == ("mixed", "rowwise_adagrad") else waits
    with cuda_is_there():
        compare(
            lambda: collection(configs, optimizers=optimizer, weighted=weighted),
            plan,
            bags_of(rng, configs, weighted),
            waits=waits,
        )


@pytest.mark.some(3)
@pytest.mark.parametrize("dedup", [True, False])
@pytest.mark.parametrize("cut", ["mixed", "row_wise", "column_wise", "data_parallel"])
def test_sequences(cut: str, dedup: bool) -> None:
    rng = Random(f"{cut} {dedup}")
    sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
    plan = random_plan(rng, sizes, Topology()) if cut == "mixed" else cut_plan(cut, rng, sizes, Topology())
    batches = [sequences.batch(rng, ["unused", "c", "a", "b"], 4) for _ in range(3)]
    with cuda_is_there():
        compare(lambda: sequences.Holder(sequences.collection(torch.optim.SGD, 0.1)), plan, batches, dedup=dedup)


@pytest.mark.some(1)
@pytest.mark.parametrize("dedup", [True, False])
def test_sequences_with_inverse_indices(dedup: bool) -> None:
    sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
    plan = cut_plan("row_wise", Random(0), sizes, Topology())
    batches = [random_sizes_bags(Random(1), {"a": 3, "b": 3, "c": 3}).features] * 3  # one order of keys
    with cuda_is_there():
        for options in ({}, {"on_bad_id": "zero"}):
            make = lambda: sequences.Holder(sequences.collection(torch.optim.SGD, 0.1))  # noqa: E731
            compare(make, plan, batches, dedup=dedup, **options)


@pytest.mark.some(1)
@pytest.mark.parametrize("policy", ["zero", "wrap"])
def test_ids_outside_their_tables(policy: str) -> None:
    rng = Random(policy)
    configs = [
        EmbeddingBagConfig(name="t0", num_embeddings=9, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=8, feature_names=["b"]),
    ]
    batches = [random_bags(rng, {"a": 19, "b": 17}, 4, shuffled=False).kjt() for _ in range(3)]
    plan = ShardingPlan(
        topology=Topology(),
        tables=(cuts.row_wise("t0", 9, 8, ranks=[0, 0]), cuts.data_parallel("t1", 7, 8)),
    )
    with cuda_is_there():
        compare(lambda: collection(configs, optimizers="adagrad"), plan, batches, on_bad_id=policy)
        sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
        plan = cut_plan("row_wise", rng, sizes, Topology())
        batches = [random_bags(rng, {"a": 19, "b": 17, "c": 3}, 4, shuffled=False).kjt() for _ in range(3)]
        compare(lambda: sequences.Holder(sequences.collection(torch.optim.SGD, 0.1)), plan, batches, on_bad_id=policy)


def test_a_gradient_for_an_ordinary_optimizer() -> None:
    """Tables of two widths, and of a dtype that no kernel knows."""
    configs = [
        EmbeddingBagConfig(name="t0", num_embeddings=9, embedding_dim=4, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=8, feature_names=["b"]),
        EmbeddingBagConfig(name="t2", num_embeddings=5, embedding_dim=8, feature_names=["c"], data_type=DataType.BF16),
    ]
    rng = Random(0)
    for cut in ("table_wise", "data_parallel"):
        plan = cut_plan(cut, rng, table_sizes(configs), Topology())
        with cuda_is_there():
            # Which ids are of which width is looked up for each of the two.
            compare(lambda: collection(configs), plan, bags_of(rng, configs), waits=3)


ROW_BLOCKS = [
    EmbeddingBagConfig(name="t0", num_embeddings=9, embedding_dim=8, feature_names=["a", "b"]),
    EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=8, feature_names=["b"]),
]


def row_blocks(boundaries: list[int] | None) -> ShardingPlan:
    """Both tables in two blocks of rows; those of t0 are even by default."""
    layouts = (
        cuts.row_wise("t0", 9, 8, ranks=[0, 0], boundaries=boundaries),
        cuts.row_wise("t1", 7, 8, ranks=[0, 0]),
    )
    return ShardingPlan(topology=Topology(), tables=layouts)


def test_batches_without_samples_or_ids() -> None:
    """fbgemm's bucketize cannot be launched for no bags."""
    rng = Random(0)
    given = [random_bags(rng, {"a": 9, "b": 7}, 3, shuffled=False).kjt() for _ in range(4)]
    for step, size in ((0, 0), (2, 2)):  # the first one has no samples, the third one no ids
        no_ids = torch.zeros(0, dtype=torch.int64)
        given[step] = KeyedJaggedTensor(["a", "b"], no_ids, lengths=torch.zeros(2 * size, dtype=torch.int32))
    with cuda_is_there():
        compare(lambda: collection(ROW_BLOCKS, optimizers="adagrad"), row_blocks(None), given)
        sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
        plan = cut_plan("row_wise", rng, sizes, Topology())
        given = [sequences.batch(rng, ["c", "a", "b"], size) for size in (0, 3, 0, 2)]
        compare(lambda: sequences.Holder(sequences.collection(torch.optim.SGD, 0.1)), plan, given)


@pytest.mark.some(1)
@pytest.mark.skipif(not native.has_operators(), reason="the C++ operators were not compiled")
@pytest.mark.parametrize("dedup", [True, False])
def test_dynamic_ids_with_batches_without_samples(dedup: bool) -> None:
    rng = Random(0)
    sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
    layouts = [cuts.row_wise(name, rows, width, ranks=[0, 0]) for name, (rows, width) in sizes.items()]
    plan = ShardingPlan(topology=Topology(), tables=tuple(layouts))
    given = [sequences.batch(rng, ["c", "a", "b"], size) for size in (0, 3, 0, 2)]
    with cuda_is_there():
        make = lambda: sequences.Holder(sequences.collection(torch.optim.SGD, 0.1))  # noqa: E731
        compare(make, plan, given, dedup=dedup, waits=None, dynamic_ids={"sequences.t1": DynamicIds()})


def test_a_structure_fault_with_row_blocks() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="sgd"), row_blocks(None), device="cuda:0")
        bad = KeyedJaggedTensor(["a"], values=torch.tensor([3]), lengths=torch.tensor([1], dtype=torch.int32))
        with pytest.raises(InputError, match="lacks feature"):
            model(to_double(bad))


def test_no_thread_or_warp_goes_through_all_the_distinct_ids() -> None:
    rng = Random(0)
    ids = {key: [[rng.randrange(4000) for _ in range(500)] for _ in range(4)] for key in ("a", "b")}
    config = EmbeddingConfig(name="t", num_embeddings=4000, embedding_dim=8, feature_names=["a", "b"])
    module = sequences.Holder(EmbeddingCollection(tables=[config]))
    plan = ShardingPlan(topology=Topology(), tables=(cuts.row_wise("sequences.t", 4000, 8, ranks=[0] * 3),))
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(module, plan, device="cuda:0")
        model(to_double(Bags(keys=("a", "b"), size=4, ids=ids).kjt()))
        assert 0 < double.longest_loop <= 64


@pytest.mark.parametrize(("boundaries", "copies"), [(None, 0), ([0, 3, 9], 3)])
def test_even_blocks_need_no_boundaries(boundaries: list[int] | None, copies: int) -> None:
    rng = Random(0)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="sgd"), row_blocks(boundaries), device="cuda:0")
        for _ in range(3):
            model(to_double(random_bags(rng, {"a": 9, "b": 7}, 3).kjt()))
        assert double.pageable_copies == copies


def test_two_ranks() -> None:
    """Over gloo, which sends what is inside of the doubles."""
    configs = [
        EmbeddingBagConfig(name="t0", num_embeddings=9, embedding_dim=8, feature_names=["a", "b"]),
        EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=8, feature_names=["b"]),
        EmbeddingBagConfig(name="t2", num_embeddings=5, embedding_dim=8, feature_names=["c"]),
    ]
    layouts = [
        cuts.row_wise("t0", 9, 8, ranks=[0, 1]),
        cuts.table_wise("t1", 7, 8, rank=1),
        cuts.data_parallel("t2", 5, 8),
    ]
    plan = ShardingPlan(topology=Topology(ranks_per_host=2), tables=tuple(layouts))

    def rank_main() -> None:
        with cuda_is_there():
            rng = Random(dist.get_rank())
            compare(lambda: collection(configs, optimizers="adagrad"), plan, bags_of(rng, configs))

    ranks(2, rank_main)


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_algorithms_keep_the_order_of_ids(deterministic: bool) -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="sgd"), row_blocks(None), device="cuda:0")
        try:
            torch.use_deterministic_algorithms(deterministic)
            model(to_double(random_bags(Random(0), {"a": 9, "b": 7}, 3).kjt())).values()
        finally:
            torch.use_deterministic_algorithms(before)
        assert double.orders_kept == deterministic


@pytest.mark.parametrize(("rows", "dtype"), [(2**31 - 1, torch.int32), (15, torch.int64)])
def test_lookups_take_ids_as_they_are(rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless fbgemm could not number the rows of all tables in the ids' dtype."""
    monkeypatch.setattr(bank, "_MAX_INT32", rows)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="sgd"), row_blocks(None), device="cuda:0")
        model(to_double(random_bags(Random(0), {"a": 9, "b": 7}, 3).kjt())).values()
        assert double.index_dtypes == {dtype}


@pytest.mark.parametrize("optimizer", ["sgd", "none"])
def test_a_table_wider_than_the_kernels_take(optimizer: str) -> None:
    configs = [
        EmbeddingBagConfig(name="t0", num_embeddings=5, embedding_dim=2052, feature_names=["a"]),
        EmbeddingBagConfig(name="t1", num_embeddings=7, embedding_dim=2048, feature_names=["b"]),
    ]
    plan = ShardingPlan(
        topology=Topology(),
        tables=tuple(cuts.table_wise(one.name, one.num_embeddings, one.embedding_dim, rank=0) for one in configs),
    )
    batches = [random_bags(Random(step), {"a": 5, "b": 7}, 3, shuffled=False).kjt() for step in range(3)]
    with cuda_is_there():
        compare(lambda: collection(configs, optimizers=optimizer), plan, batches, waits=9)


def test_blocks_of_a_table_are_added_up_by_one_kernel() -> None:
    """26 tables in 8 blocks of rows, all on one rank."""
    names = [f"t{number}" for number in range(26)]
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=40, embedding_dim=4, feature_names=[name]) for name in names
    ]
    plan = ShardingPlan(topology=Topology(), tables=tuple(cuts.row_wise(one, 40, 4, ranks=[0] * 8) for one in names))
    batches = [random_bags(Random(step), dict.fromkeys(names, 40), 3, shuffled=False).kjt() for step in range(3)]
    with cuda_is_there():
        compare(lambda: collection(configs, optimizers="sgd"), plan, batches)
        with cuda_double() as double, double.may_wait():
            model = shard(collection(configs, optimizers="sgd"), plan, device="cuda:0")
            features = to_double(batches[0])
            double.operators.clear()
            model(features).values()
            assert sum(count for name, count in double.operators.items() if name.startswith("aten.add")) < 10
            assert double.operators["aten.sum.dim_IntList"] < 26 + 10


@pytest.mark.parametrize(("optimizer", "restored"), [("sgd", 0), ("adagrad", 0), ("adam", 3)])
def test_rows_without_gradient_are_restored_for_adam_alone(optimizer: str, restored: int) -> None:
    configs = [EmbeddingBagConfig(name="t2", num_embeddings=5, embedding_dim=8, feature_names=["c"])]
    plan = ShardingPlan(topology=Topology(), tables=(cuts.data_parallel("t2", 5, 8),))
    batches = [random_bags(Random(step), {"c": 5}, 2, shuffled=False).kjt() for step in range(3)]
    with cuda_is_there():
        compare(lambda: collection(configs, optimizers=optimizer), plan, batches)
        with cuda_double() as double, double.may_wait():
            model = shard(collection(configs, optimizers=optimizer), plan, device="cuda:0")
            features = to_double(batches[0])
            loss = model(features).values().sum()
            double.operators.clear()
            loss.backward()
            assert double.operators["aten.where.self"] == restored


def test_a_rank_that_is_gone_while_the_device_waits() -> None:
    """As with NCCL: collectives are issued at once, and the device waits until the communicators are aborted."""

    def rank_main() -> str:
        aborted = threading.Event()
        functional = torch.ops._c10d_functional
        plan = cut_plan("row_wise", Random(0), table_sizes(ROW_BLOCKS), Topology(ranks_per_host=2))
        with cuda_is_there(), cuda_double() as double, double.may_wait(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(peers, "_WATCH_S", 0.05)
            model = shard(collection(ROW_BLOCKS, optimizers="sgd"), plan, device="cuda:0")
            features = to_double(random_bags(Random(0), {"a": 9, "b": 7}, 3).kjt())
            model(features).values().sum().backward()
            if dist.get_rank() == 1:
                os._exit(3)
            patch.setattr(functional, "all_to_all_single", lambda values, *_: values.clone())
            patch.setattr(functional, "wait_tensor", lambda values: values)
            patch.setattr(peers, "_abort", aborted.set)
            patch.setattr(EventDouble, "query", lambda _: aborted.is_set())
            patch.setattr(double, "wait", lambda why: aborted.wait(20))
            with pytest.raises(PeerError, match=r"rank 1's process \d+ has ended") as caught:
                model(features)
        assert aborted.is_set()
        assert caught.value.ranks == (1,)
        return caught.value.waited_for

    assert ranks(2, rank_main, expect_death={1})[0] == "header exchange"


def test_a_batch_on_another_device() -> None:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="sgd"), row_blocks(None), device="cuda:0")
        with pytest.raises(
            InputError, match=r"the ids are on cpu and the tables of this module .* on cuda:0. Move the batch"
        ):
            model(random_bags(Random(0), {"a": 9, "b": 7}, 3).kjt())


def any_normal(values: Tensor) -> None:
    """Draws from torch's own generator, on the device where :func:`check_init_fn` does not call it."""
    assert values.is_cuda or values.size(0) < 4 or not ACTIVE
    nn.init.normal_(values)


@pytest.mark.parametrize("init_fn", [None, any_normal])
@pytest.mark.parametrize("shards", [1, 2, 5])
def test_blocks_are_drawn_on_the_device_whatever_the_shards(
    shards: int, init_fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(initial, "WHOLE_BYTES", 0)
    monkeypatch.setattr(initial, "_BLOCK_ELEMENTS", 56)
    config = EmbeddingBagConfig(name="t0", num_embeddings=50, embedding_dim=8, feature_names=["a"], init_fn=init_fn)
    edges = [50 * number // shards for number in range(shards + 1)]
    layout = cuts.row_wise("t0", 50, 8, ranks=[0] * shards, boundaries=edges)
    with cuda_is_there(), cuda_double() as double:
        with double.may_wait():
            module = collection([config], device="meta")
            torch.manual_seed(1)
            model = shard(module, ShardingPlan(topology=Topology(), tables=(layout,)), device="cuda:0")
        after = torch.rand(())
        drawn = torch.cat([one.inner for one in model.parameters()])  # type: ignore[attr-defined]
    torch.manual_seed(1)
    whole = torch.empty((50, 8))
    initial.TableDraw(config=config, seed=int(torch.randint(2**32, ()))).fill(whole, None)
    assert torch.equal(drawn, whole)  # the double draws on the CPU
    assert torch.equal(after, torch.rand(()))


def test_a_background_save_pins_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_PINNED_BYTES", 64, raising=False)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS, optimizers="adagrad"), row_blocks(None), device="cuda:0")
        for folder in ("first", "second"):
            model(to_double(random_bags(Random(0), {"a": 9, "b": 7}, 3).kjt())).values().sum().backward()
            double.pinned_bytes = 0
            pending = save.save_checkpoint(tmp_path / folder, model, wait=False)
            assert double.pinned_bytes == 64
            pending.wait()
        expected = {name: weight.clone() for name, weight in weights(model).items()}
    loaded = shard(collection(ROW_BLOCKS, optimizers="adagrad"), row_blocks(None))
    load_checkpoint(tmp_path / "second", loaded)
    for name, weight in weights(loaded).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.some(2)
@pytest.mark.parametrize("policy", ["error", "zero"])
@pytest.mark.parametrize("cut", ["row_blocks", "table_wise"])
def test_a_portable_program_waits_for_its_header_and_counts(
    cut: str, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TorchScript compiles, run by Python. A lookup group's ids are split by table."""
    rng = Random(cut)
    tables = {"t0": (9, 8), "t1": (7, 8)}
    plan = row_blocks(None) if cut == "row_blocks" else cut_plan(cut, rng, tables, Topology())
    given = random_bags(rng, {"a": 9, "b": 7}, 3, extra=["unused"]).kjt()
    expected = shard(collection(ROW_BLOCKS), plan, on_bad_id=policy)(given).values()
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(collection(ROW_BLOCKS), plan, device="cuda:0", on_bad_id=policy)
        twin = plain(PortableBags(model.module)).eval()  # type: ignore[arg-type]
        moved = to_double(given)
        monkeypatch.setattr(torch.jit, "is_scripting", lambda: True)
        double.waits.clear()
        found = twin(moved).wait().values()
        assert [one.partition(":")[0] for one in double.waits] == ["portable/portable_input.py", "_torchscript.py"], (
            double.waits
        )
        assert torch.allclose(found.cpu(), expected)


@pytest.mark.some(1)
@pytest.mark.parametrize("size", [0, 3])
def test_portable_sequences(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two features of one table, in a batch with and without samples."""
    given = sequences.batch(Random(0), ["c", "a", "b"], size)
    sizes = {f"sequences.{name}": (rows, sequences.DIM) for name, rows in sequences.ROWS.items()}
    layouts = [cuts.row_wise(name, rows, width, ranks=[0, 0]) for name, (rows, width) in sizes.items()]
    plan = ShardingPlan(topology=Topology(), tables=tuple(layouts))
    expected = shard(sequences.Holder(sequences.collection(None, 0.1)), plan)(given)
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(sequences.Holder(sequences.collection(None, 0.1)), plan, device="cuda:0")
        twin = plain(PortableSequences(model.module.sequences)).eval()  # type: ignore[arg-type, union-attr]
        moved = to_double(given)
        monkeypatch.setattr(torch.jit, "is_scripting", lambda: True)
        assert torch.equal(value_of(twin(moved).wait()).cpu(), value_of(expected))


def test_held_out_metrics_are_read_once() -> None:
    batches = []
    for step in range(4):
        sparse = random_bags(Random(step), feature_rows(CONFIGS), 3, shuffled=False).kjt()
        labels = torch.tensor([0.0, 1.0, 1.0])
        batches.append(ClickBatch(dense=torch.rand(3, 3), sparse=sparse, labels=labels))

    def metrics(device: str) -> ClickMetrics:
        model = shard(click_model(CONFIGS), mixed_plan(1), device=device)
        return evaluate(model, batches, torch.device(device))

    expected = metrics("cpu")
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        found = metrics("cuda:0")
        assert [one.partition(":")[0] for one in double.waits[-5:]] == [HEADER] * 4 + ["trainer/run/held_out.py"]
    assert found.rows == 12
    assert (found.auc, found.logloss) == pytest.approx((expected.auc, expected.logloss), abs=1e-5)


@pytest.mark.skipif(not INTERPRETS_TRITON, reason="needs Triton and TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("options", "ids", "waits"),
    [
        ({"fallback_rows": 1}, [[1, 2, 3], [2, 3, 3, 1], [2, -7, 2]], []),
        ({"admit_after": 2}, [[1, 2], [1, 2], [2, 1]], []),
        ({"admit_after": 2}, [[1, 2], [1, 2], [2, 5]], ["ids/maps.py"]),
        ({"evict": "lru"}, [list(range(9)), [3, 4], [3, 11, 12, 13]], ["ids/device_maps.py"]),
    ],
    ids=["new", "hits", "zeros", "evicted"],
)
def test_waits_of_dynamic_ids(options: dict[str, Any], ids: list[list[int]], waits: list[str]) -> None:
    """The host waits for the list of ids without a row; for zeros and evictions once more, as docs/design.md says."""
    plan = ShardingPlan(
        topology=Topology(), tables=(cuts.table_wise("t0", 9, 8, rank=0), cuts.table_wise("t1", 7, 8, rank=0))
    )
    batches = [Bags(keys=("a", "b"), size=1, ids={"a": [raw], "b": [[0]]}).kjt() for raw in ids]
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        model = shard(
            collection(ROW_BLOCKS, optimizers="adagrad"),
            plan,
            device="cuda:0",
            dynamic_ids={"t0": DynamicIds(**options)},
        )
        for features in batches:
            on_device = to_double(features)
            double.waits.clear()
            value_of(model(on_device))
        files = [line.partition(":")[0] for line in double.waits]
        assert list(dict.fromkeys(files[2:])) == waits, double.waits
        assert files[:2] == [HEADER, "ids/device_maps.py"]
