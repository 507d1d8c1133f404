"""The first values of tables on meta that are drawn by blocks of rows: the same under every plan, where they are."""

from __future__ import annotations

import math
import resource
from collections.abc import Callable
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from shardrec.errors import ConfigError
from shardrec.ids.options import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import initial, shard
from tests.models import collection, table_sizes
from tests.modules.tables import local_part
from tests.plans import cut_plan, random_layout, randoms
from tests.ranks import ranks

InitFn = Callable[[Tensor], object]


def normal(values: Tensor) -> None:
    """Draws from torch's own generator."""
    nn.init.normal_(values, std=0.1)


INIT_FNS: list[InitFn | None] = [None, normal, nn.init.trunc_normal_, nn.init.ones_, nn.init.kaiming_uniform_]


def config(rows: int, dim: int, init_fn: InitFn | None = None, name: str = "t") -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], init_fn=init_fn
    )


ROWS = 300_000  # times 64 columns: more than is drawn whole


# -------------------------------------------------------------------------------------------------------- one table


@settings(max_examples=60, deadline=None)
@given(rng=randoms())
def test_a_shard_has_the_table_s_values_under_every_cut(rng: Random) -> None:
    rows, dim, dtype = rng.randint(1, 40), rng.randint(1, 12), rng.choice([torch.float32, torch.float16])
    draw = initial.TableDraw(config=config(rows, dim, rng.choice(INIT_FNS)), seed=rng.randrange(2**31))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(initial, "_BLOCK_ELEMENTS", rng.randint(1, 60))
        whole = torch.full((rows, dim), math.nan, dtype=dtype)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        draw.fill(whole, None)
        patch.setattr(torch, "get_num_threads", lambda: rng.randint(1, 4))
        for place in random_layout(rng, "t", rows, dim, 3).shards:
            part = torch.full((place.rows, place.cols), math.nan, dtype=dtype)
            draw.fill(part, place)
            assert torch.equal(part, local_part(whole, place))


def test_blocks_and_tables_have_values_of_their_own() -> None:
    meta = collection([config(ROWS, 64), config(ROWS, 64, name="u")], device="meta")
    draws = dict(initial.first_values(meta))
    for draw in draws.values():
        assert isinstance(draw, initial.TableDraw)
    size = draw.block_rows
    head = torch.empty((ROWS, 64)), torch.empty((ROWS, 64))
    for values, draw in zip(head, draws.values(), strict=True):
        draw.fill(values, None)
    blocks = [block for values in head for block in values.split(size)]
    assert len({block[0, 0].item() for block in blocks}) > 0.9 * len(blocks)
    bound = math.sqrt(1 / ROWS)
    for values in head:
        assert 0.999 * bound < float(values.abs().max()) <= bound
        assert abs(float(values.mean())) < 0.01 * bound
        assert abs(float(values.std()) - bound / math.sqrt(3)) < 0.01 * bound


@pytest.mark.parametrize("init_fn", [None, normal])
def test_drawing_leaves_torch_s_generator_alone(init_fn: InitFn | None) -> None:
    draw = initial.TableDraw(config=config(20_000, 64, init_fn), seed=3)
    state = torch.get_rng_state()
    values = torch.empty((20_000, 64))
    draw.fill(values, None)
    initial.draw_rows(draw.config, cuts.table_wise("t", 20_000, 64, rank=0).shards[0], 5, step=1)
    assert torch.equal(torch.get_rng_state(), state)


def test_rows_drawn_anew_do_not_depend_on_the_columns_of_a_shard() -> None:
    whole, *halves = (
        torch.cat([initial.draw_rows(config(9, 8), place, 3, step=2) for place in layout.shards], dim=1)
        for layout in (
            cuts.table_wise("t", 9, 8, rank=0),
            cuts.column_wise("t", 9, 8, ranks=[0, 1]),
        )
    )
    assert torch.equal(whole, halves[0])


# ------------------------------------------------------------------------------------------------------------ init_fn


def fan_out(values: Tensor) -> None:
    nn.init.kaiming_normal_(values, mode="fan_out")


def counted(values: Tensor) -> None:
    values.copy_(torch.arange(values.numel()).view_as(values))


def stored(values: Tensor) -> None:
    values.copy_(torch.ones((ROWS, 64)))


REFUSED = [
    nn.init.xavier_uniform_,
    nn.init.xavier_normal_,
    fan_out,
    counted,
    stored,
    partial(nn.init.sparse_, sparsity=0.5),
]


@pytest.mark.parametrize("init_fn", REFUSED)
def test_an_init_fn_that_depends_on_the_number_of_rows_is_refused(init_fn: InitFn) -> None:
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", ROWS, 64, rank=0),))
    with pytest.raises(ConfigError, match=r"'t'.*init_fn.*depend on the number of rows.*functools\.partial"):
        shard(collection([config(ROWS, 64, init_fn)], device="meta"), plan)


@pytest.mark.parametrize("init_fn", INIT_FNS)
def test_an_init_fn_of_rows_is_taken(init_fn: InitFn | None) -> None:
    for _ in range(20):  # of which one that rejects values may call another number of operators each time
        initial.check_init_fn(config(ROWS, 64, init_fn))


def test_a_small_table_may_have_any_init_fn() -> None:
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", 50, 64, rank=0),))
    reference = collection([config(50, 64, nn.init.xavier_uniform_)], seed=3)
    meta = collection([config(50, 64, nn.init.xavier_uniform_)], device="meta")
    torch.manual_seed(3)
    (values,) = shard(meta, plan).parameters()
    assert torch.equal(values, reference.embedding_bags["t"].weight)


def test_a_table_with_dynamic_ids_is_drawn_some_rows_at_a_time() -> None:
    plan = ShardingPlan(topology=Topology(), tables=(cuts.table_wise("t", 50, 64, rank=0),))
    options = DynamicIds(fallback_rows=1, evict="never")
    with pytest.raises(ConfigError, match=r"'t'.*init_fn.*dynamic ids"):
        shard(collection([config(50, 64, nn.init.xavier_uniform_)]), plan, dynamic_ids={"t": options})


# -------------------------------------------------------------------------------------------------------- collections


@pytest.mark.some(1)
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "sequences"])
def test_ranks_and_plans_give_a_collection_the_same_values(pooled: bool) -> None:
    rows = 10_000  # 2.5 blocks

    def rank_main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(initial, "WHOLE_BYTES", 2**20)
            compare()

    def compare() -> None:
        for cut in ("table_wise", "row_wise", "column_wise", "data_parallel"):
            plan = cut_plan(
                cut, Random(cut), {"t": (rows, 64), "u": (7, 8 if pooled else 64)}, Topology(ranks_per_host=2)
            )
            model = (
                EmbeddingBagCollection(tables=[config(rows, 64), config(7, 8, name="u")], device=torch.device("meta"))
                if pooled
                else EmbeddingCollection(
                    tables=[
                        EmbeddingConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["f"]),
                        EmbeddingConfig(name="u", num_embeddings=7, embedding_dim=64, feature_names=["g"]),
                    ],
                    device=torch.device("meta"),
                )
            )
            torch.manual_seed(11)
            draws = dict(initial.first_values(model))
            torch.manual_seed(11)
            sharded = shard(model, plan).module
            after = [torch.empty(3) for _ in range(2)]
            dist.all_gather(after, torch.rand(3))
            assert torch.equal(*after), cut
            for name, table in sharded.tables().items():  # type: ignore[operator,union-attr]
                draw = draws[name]
                assert isinstance(draw, initial.TableDraw)
                whole = torch.empty((draw.config.num_embeddings, draw.config.embedding_dim))
                draw.fill(whole, None)
                for place, parameter in table.locals.items():
                    assert torch.equal(parameter, local_part(whole, place)), (cut, name)

    ranks(2, rank_main)


def test_a_table_larger_than_a_rank_s_memory_is_sharded() -> None:
    """Each rank may take its half of the table, 64 MiB, and as much that the allocator takes in advance."""

    def rank_main() -> int:
        mebi = 1 << 20
        topology = Topology(ranks_per_host=2)
        large, small = config(2 * mebi, 64), config(5, 64)  # 512 MiB
        for table in (small, large):  # the first one for imports, threads, and the transport's memory
            module = collection([table], device="meta")
            plan = cut_plan("row_wise", Random(0), table_sizes([table]), topology)
            if table is small:
                shard(module, plan)
        with open("/proc/self/status") as status:
            (used,) = (int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (used + (256 + 64 + 64) * mebi, limits[1]))
        try:
            with pytest.raises(RuntimeError, match="allocate"):
                torch.empty((4 * mebi, 64))  # more than the table: threads of earlier tests may end and give some back
            return sum(one.nbytes for one in shard(module, plan).parameters())
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, limits)

    assert ranks(2, rank_main) == [256 << 20] * 2
