"""Each entry of the inventory through each carrier of state: what docs/design.md says becomes of it."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from shardrec import Publisher, load_checkpoint, save_checkpoint, shard, warm_start
from shardrec.checkpoint import export_ids, import_ids
from shardrec.errors import PlanError
from shardrec.ids import DynamicIds
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules.inventory import Kind
from shardrec.modules.sharded_model import ShardedModel
from shardrec.replicas import Replicas
from shardrec.serve import Follower, quantize
from shardrec.serve.published import published_tensors
from tests.models import apply_optimizer_in_backward
from tests.ranks import ranks

TABLES = ("fused", "dynamic", "plain")
ROWS, DIM = 12, 8
State = dict[str, Any]


class Scaled(nn.Module):
    """Has extra state."""

    scale = 1.0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.scale)

    def set_extra_state(self, state: Tensor) -> None:
        self.scale = float(state)


class Everything(nn.Module):
    """Something of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=DIM, feature_names=[name])
                for name in TABLES
            ]
        )
        self.norm, self.top, self.scaled = nn.BatchNorm1d(3 * DIM), nn.Linear(3 * DIM, 1), Scaled()
        tables = self.bags.embedding_bags
        for table in (tables["fused"], tables["dynamic"]):
            apply_optimizer_in_backward(torch.optim.Adam, table.parameters(), {"lr": 0.1})
        for module in (self.norm, self.top):
            apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        value: Tensor = self.top(self.norm(self.bags(features).values()))
        return value * self.scaled.scale


DYNAMIC = {"bags.dynamic": DynamicIds(admit_after=2)}


def plan_of(first: int, ranks_of_plan: int = 2) -> ShardingPlan:
    tables = [
        cuts.table_wise(f"bags.{name}", ROWS, DIM, rank=(first + number) % ranks_of_plan)
        for number, name in enumerate(TABLES)
    ]
    return ShardingPlan(topology=Topology(ranks_per_host=ranks_of_plan), tables=tuple(tables))


def make(seed: int, plan: ShardingPlan, **options: Any) -> ShardedModel:
    torch.manual_seed(seed)
    model = shard(Everything(), plan, update="step", **({"dynamic_ids": DYNAMIC} | options))
    for collection in model.sharded_collections:
        collection.keep_averages(0.9)
    return model


def train(model: ShardedModel, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        ids = torch.randint(0, ROWS, (18,), generator=generator)
        features = KeyedJaggedTensor(keys=list(TABLES), values=ids, lengths=torch.full((9,), 2))
        model(features).square().sum().backward()
        model.fused_optimizer.step()
        model.zero_grad()


def trained(seed: int, plan: ShardedModel | ShardingPlan, **options: Any) -> ShardedModel:
    """Another model for each seed, with other values in everything that it holds."""
    model = make(seed, plan, **options)
    train(model, 2 + seed, seed)
    for group in (*model.fused_optimizer.param_groups, *in_backward(model)[0].param_groups):
        group["lr"] = 0.01 * (1 + seed)
    model.fused_optimizer.push()
    own = model.fused_optimizer.params["__own"] = nn.Parameter()  # as a wrapper such as WarmupOptimizer has it
    model.fused_optimizer.state[own] = {"steps": torch.tensor([seed]), "phase": seed}
    model.module.scaled.scale = 1.0 + seed
    if seed:
        model.module.bags.tables()["plain"].requires_grad_(False)
    return model


def in_backward(model: ShardedModel) -> list[torch.optim.Optimizer]:
    return [
        each for layer in (model.module.norm, model.module.top) for p in layer.parameters() for each in optimizers(p)
    ]


def optimizers(parameter: Any) -> list[torch.optim.Optimizer]:
    return list(parameter._in_backward_optimizers)


def rows_of(model: ShardedModel, states: Callable[[Any], tuple[str, ...]]) -> State:
    bags: Any = model.module.bags
    return {
        f"{name} {state}": part.clone()
        for name, optimizer in bags.fused_optimizers().items()
        for state in states(optimizer)
        for part in bags.fused_state(name, state).values()
    }


def ids_of(model: ShardedModel) -> State:
    found: State = {}
    for id_map in model.module.bags.id_maps.maps.values() if model.module.bags.id_maps else ():
        found["rows"] = torch.where(id_map.records[:, 1] > 0, id_map.records[:, 0], -1)
        found["uses"], found["waiting"] = id_map.records.clone(), id_map.candidates.clone()
    return found


def plain(model: ShardedModel) -> list[nn.Parameter]:
    return list(model.module.bags.tables()["plain"].parameters())


READ: dict[Kind, Callable[[ShardedModel], State]] = {
    Kind.WEIGHT: lambda model: {
        name: weight.detach().clone()
        for name, table in model.module.bags.tables().items()
        for weight in table.locals.values()
    },
    Kind.FUSED: lambda model: rows_of(model, lambda optimizer: optimizer.states),
    Kind.AVERAGE: lambda model: rows_of(model, lambda _: ("average", "average_step")),
    Kind.IDS: ids_of,
    Kind.DENSE: lambda model: {
        name: value.detach().clone()
        for name, value in (*model.named_parameters(), *model.named_buffers())
        if not name.startswith("bags")
    },
    Kind.EXTRA: lambda model: {"scale": model.module.scaled.scale},
    Kind.COUNTS: lambda model: {key: n for key, n in model.module.bags.step_counts().items() if n},
    Kind.SETTINGS: lambda model: (
        {"lr": [group["lr"] for group in model.fused_optimizer.param_groups]}
        | dict(model.fused_optimizer.state.get(model.fused_optimizer.params.get("__own"), {}))
    ),
    Kind.IN_BACKWARD: lambda model: (
        {
            f"{number} {key}": value.clone()
            for number, each in enumerate(in_backward(model))
            for states in each.state.values()
            for key, value in states.items()
        }
        | {f"lr {number}": each.param_groups[0]["lr"] for number, each in enumerate(in_backward(model))}
    ),
    Kind.FROZEN: lambda model: dict.fromkeys(["plain"] * len(plain(model)), any(p.requires_grad for p in plain(model))),
}
"""How to look at each kind, without the inventory."""


def read(model: ShardedModel) -> dict[Kind, State]:
    """What all ranks hold."""
    mine, found = {kind: READ[kind](model) for kind in Kind}, [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return {kind: {key: value for rank in found for key, value in rank[kind].items()} for kind in Kind}  # type: ignore[index]


def same(one: State, two: State) -> bool:
    equal: Any = lambda a, b: torch.equal(a, b) if isinstance(a, Tensor) else a == b  # noqa: E731
    return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)


def inference_tensors() -> set[int]:
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    with torch._C.DisableTorchFunctionSubclass():
        return {id(tensor) for tensor in tensors if tensor.is_inference()}


def by_checkpoint(source: ShardedModel, target: Callable[..., ShardedModel], folder: Path) -> ShardedModel:
    save_checkpoint(folder, source)
    load_checkpoint(folder, model := target(plan_of(1)))
    return model


def by_warm_start(source: ShardedModel, target: Callable[..., ShardedModel], folder: Path) -> ShardedModel:
    save_checkpoint(folder, source)
    warm_start(folder, model := target(plan_of(1)), optimizer=True)
    return model


def by_reshard(source: ShardedModel, target: Callable[..., ShardedModel], folder: Path) -> ShardedModel:
    assert source.reshard(plan_of(1)) or dist.get_rank()
    return source


def by_state_dict(source: ShardedModel, target: Callable[..., ShardedModel], folder: Path) -> ShardedModel:
    (model := target(plan_of(0))).load_state_dict(source.state_dict())
    return model


def by_id_files(source: ShardedModel, target: Callable[..., ShardedModel], folder: Path) -> ShardedModel:
    export_ids(source, folder)
    dist.barrier()
    import_ids(model := target(plan_of(0)), folder)
    return model


CARRIERS: dict[str, Callable[..., ShardedModel]] = {
    "checkpoint": by_checkpoint,
    "warm start": by_warm_start,
    "deep copy": lambda source, target, folder: copy.deepcopy(source),
    "reshard": by_reshard,
    "state_dict": by_state_dict,
    "id files": by_id_files,
}


def documented() -> dict[str, dict[Kind, str]]:
    """By the table of docs/design.md: of each carrier, what becomes of each kind."""
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    lines = text.partition("| kind |")[2].partition("\n\n")[0].splitlines()
    names, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in (f"{lines[0]}", *lines[2:]))
    return {
        name: {Kind[cells[0].upper().replace(" ", "_")]: cells[number + 1] for cells in rows}
        for number, name in enumerate(names)
    }


def check(cell: str, kind: Kind, got: State, source: State, before: State, fresh: State) -> None:
    assert kind is Kind.FROZEN or not same(source, before), f"{kind}: the models must differ"
    anew = {key: value for key, value in fresh.items() if not key.startswith("lr")}
    expected = {"taken": source, "kept": before, "anew": anew}
    if cell == "rows":
        assert torch.equal(got["rows"], source["rows"]), kind
    else:
        if cell == "anew":  # settings, such as learning rates, stay
            got = {key: value for key, value in got.items() if not key.startswith("lr")}
        assert same(got, expected[cell]), f"{kind} was not {cell}"


@pytest.mark.parametrize("carrier", CARRIERS)
def test_each_kind_through_each_carrier(carrier: str, tmp_path: Path) -> None:
    cells = documented()[carrier]

    def rank_main() -> None:
        source, fresh = trained(2, plan_of(0)), read(make(0, plan_of(0)))
        values = read(source)
        before: dict[Kind, State] = {}

        def target(plan: ShardingPlan) -> ShardedModel:
            model = trained(0, plan)
            before.update(read(model))
            return model

        got = read(CARRIERS[carrier](source, target, tmp_path / "carried"))
        for kind in Kind:
            check(cells[kind], kind, got[kind], values[kind], before.get(kind, {}), fresh[kind])

    ranks(2, rank_main)


def test_each_kind_into_a_replica_that_joins(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cells = documented()["joining replica"]

    def rank_main(address: str) -> None:
        rank, plan = dist.get_rank(), plan_of(0, 1)
        alone: Any = {"group": [dist.new_group([each]) for each in range(2)][rank]}
        elastic: Any = {"replicas": Replicas(2, elastic=address), **alone}
        with pytest.raises(PlanError, match="dynamic_ids"):
            make(0, plan, **elastic)
        source = trained(2, plan, dynamic_ids={}, **alone)
        for number in range(2):  # the first to come is the one whose state the other takes
            if number == rank:
                model = make(0, plan, dynamic_ids={}, **elastic)
            dist.barrier()
        if rank == 0:
            save_checkpoint(tmp_path / "saved", source)
            load_checkpoint(tmp_path / "saved", model)
            model.module.bags.tables()["plain"].requires_grad_(False)
        before, tensors = {kind: READ[kind](model) for kind in Kind}, inference_tensors()
        with torch.inference_mode():
            model.join()  # type: ignore[operator]
            assert not inference_tensors() - tensors
        for kind in Kind if rank else ():
            values = READ[kind](source)
            if cells[kind] == "refused":
                assert kind is Kind.IDS
            else:
                check(cells[kind], kind, READ[kind](model), values, before[kind], {})

    ranks(2, rank_main, f"127.0.0.1:{store.port}")


def test_each_kind_in_a_published_version() -> None:
    model = trained(2, plan_of(0, 1))
    names = set(published_tensors(model))
    cells = documented()["published version"]
    for collection in model.sharded_collections:
        tables = {f"model.bags.embedding_bags.{name}.weight" for name in collection.tables()}
    found = {Kind.WEIGHT: tables <= names, Kind.DENSE: {"model.top.weight", "model.norm.running_mean"} <= names}
    found |= {Kind.EXTRA: "model.scaled._extra_state" in names}
    for kind in Kind:
        expected = found.get(kind, any(name.startswith(f"{kind.value}.") for name in names))
        assert cells[kind] == ("rows" if kind is Kind.IDS else "taken" if expected else "kept"), kind


def test_the_table_has_each_kind_and_each_carrier_a_test() -> None:
    cells = documented()
    assert cells.keys() == {*CARRIERS, "joining replica", "published version"}
    assert all(column.keys() == set(Kind) for column in cells.values())
    assert READ.keys() == set(Kind)
    words = {word for column in cells.values() for word in column.values()}
    assert words == {"taken", "kept", "anew", "rows", "refused"}
    assert re.search(r"^## The inventory", (Path(__file__).parents[2] / "docs/design.md").read_text(), re.MULTILINE)


Target = Callable[..., ShardedModel]


def in_background(source: ShardedModel, target: Target, folder: Path) -> None:
    save_checkpoint(folder, source, wait=False).wait()


def changed_rows(source: ShardedModel, target: Target, folder: Path) -> None:
    save_checkpoint(folder, source, incremental=3)


def with_optimizers(source: ShardedModel, target: Target, folder: Path) -> None:
    for model, use in ((source, save_checkpoint), (target(plan_of(1)), load_checkpoint)):
        if "adam" not in vars(model):
            vars(model)["adam"] = torch.optim.Adam([{"params": list(model.dense_parameters())}])
        if model is source:
            step(model)
        use(folder, model, vars(model)["adam"])  # type: ignore[operator]


@torch.inference_mode(False)
def step(model: ShardedModel) -> None:
    """Of the tables' optimizer, and of the ordinary one if there is one."""
    train(model, 2, seed=5)
    for parameter in model.dense_parameters():
        parameter.grad = torch.ones_like(parameter)
    if adam := vars(model).get("adam"):
        adam.step()
    model.zero_grad()


def of_the_tables_optimizer(source: ShardedModel, target: Target, folder: Path) -> None:
    target(plan_of(0)).fused_optimizer.load_state_dict(source.fused_optimizer.state_dict())


def in_a_publisher(source: ShardedModel, target: Target, folder: Path) -> None:
    vars(source).setdefault("publisher", Publisher(source, folder)).publish()


def served_copy(source: ShardedModel, target: Target, folder: Path) -> None:
    quantize(source)


OTHERS = {
    "background": in_background,
    "incremental": changed_rows,
    "checkpoint with optimizers": with_optimizers,
    "fused optimizer": of_the_tables_optimizer,
    "published version": in_a_publisher,
    "served copy": served_copy,
}


def test_carriers_in_inference_mode(tmp_path: Path) -> None:
    """One after the other on the same models, which go on training."""

    def rank_main() -> None:
        source, targets = trained(2, plan_of(0)), [trained(0, plan_of(first)) for first in range(2)]
        before = inference_tensors()
        carriers: dict[str, Callable[..., Any]] = CARRIERS | OTHERS
        for carrier, carry in carriers.items():
            for inside in (True, False):
                with torch.inference_mode(inside):
                    carried = carry(source, lambda plan: targets[plan != plan_of(0)], tmp_path / carrier)
                    assert not inference_tensors() - before, carrier
                for model in dict.fromkeys([source, *targets, carried or source]):
                    step(model)
                if carrier == "reshard":
                    source.reshard(plan_of(0))

    ranks(2, rank_main)


def test_a_model_that_was_served_in_inference_mode_follows(tmp_path: Path) -> None:
    model = trained(1, plan_of(0, 1))
    publisher, before = Publisher(model, tmp_path), inference_tensors()
    with torch.inference_mode():
        served = quantize(model, "fp32")
        follower = Follower(served, served.formats, tmp_path, interval=1.0)
        for _ in range(2):
            step(model)
            publisher.publish()
            assert follower.poll()
        assert not inference_tensors() - before
    step(model)
    publisher.publish()
    assert follower.poll()
