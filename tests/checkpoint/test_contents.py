"""What a checkpoint holds: rank 0's buffers, learning rates, each rank's own, FSDP2's parameters; and who reads it."""

from __future__ import annotations

import json
import math
import os
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torchrec import KeyedJaggedTensor
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper

from shardrec import load_checkpoint, save_checkpoint, shard
from shardrec.checkpoint import data_files as files
from shardrec.errors import CheckpointError, ConfigError
from shardrec.modules import ShardedModel
from tests.batches import random_bags
from tests.checkpoint.memory import peak
from tests.checkpoint.models import CUTS, DIM, ROWS, Click, adam, held, make, train, whole
from tests.models import apply_optimizer_in_backward
from tests.plans import cut_plan, topologies_of
from tests.ranks import ranks


def test_buffers_are_rank_0s(tmp_path: Path) -> None:
    def rank_main() -> list[Tensor]:
        model = make("table_wise", "adagrad")
        # Rank 1 has more tables, so that a balance by size would choose it.
        train(model, adam(model), 2, seed=1)
        own = model.module.norm.running_mean.clone()
        save_checkpoint(tmp_path / "ckpt", model)
        model.module.norm.running_mean.fill_(7.0)
        load_checkpoint(tmp_path / "ckpt", model)
        return [own, model.module.norm.running_mean]

    (first, loaded), (second, also) = ranks(2, rank_main)
    assert not torch.equal(first, second)
    assert torch.equal(first, loaded)
    assert torch.equal(first, also)


def test_learning_rates_go_with_the_checkpoint(tmp_path: Path) -> None:
    model = make("row_wise", "adagrad")
    optimizer = adam(model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (optimizer, model.fused_optimizer)]
    train(model, optimizer, 1, seed=1)
    for schedule in schedules:
        schedule.step()
    save_checkpoint(tmp_path / "ckpt", model, optimizer)
    expected = [group["lr"] for one in (optimizer, model.fused_optimizer) for group in one.param_groups]
    train(model, optimizer, 1, seed=2)
    other = make("grid", "adagrad")
    theirs = adam(other)
    load_checkpoint(tmp_path / "ckpt", other, theirs)
    assert [group["lr"] for one in (theirs, other.fused_optimizer) for group in one.param_groups] == expected
    train(other, theirs, 1, seed=2)
    pairs = zip(held(model, optimizer), held(other, theirs), strict=True)
    assert all(torch.equal(one[2], two[2]) for one, two in pairs)


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    def save_main() -> None:
        rank, model = dist.get_rank(), make("row_wise", "sgd")
        own = {"rng": torch.get_rng_state(), f"only {rank}": torch.tensor(rank), "none": torch.empty(0)}
        save_checkpoint(tmp_path / "ckpt", model, rank_state=own)

    def load_main() -> tuple[dict[str, Tensor], bool]:
        found = {"left": torch.zeros(1)}
        load_checkpoint(tmp_path / "ckpt", make("row_wise", "sgd"), rank_state=found)
        return found, "rng" in found and torch.equal(found["rng"], torch.get_rng_state())

    ranks(2, save_main)
    for rank, (found, same) in enumerate(ranks(2, load_main)):
        assert same
        assert found.keys() == {"rng", f"only {rank}", "none"}
        assert found[f"only {rank}"].item() == rank
    assert ranks(1, load_main) == [({}, False)]


def batch() -> KeyedJaggedTensor:
    return random_bags(Random(3), ROWS, 5).kjt()


def test_fsdp_saves_what_ddp_loads_and_the_other_way_round(tmp_path: Path) -> None:
    def rank_main() -> None:
        models = {dense: make("row_wise", "adagrad", dense=dense) for dense in ("fsdp", "ddp")}
        optimizers = {dense: adam(model) for dense, model in models.items()}
        for one, two in (("fsdp", "ddp"), ("ddp", "fsdp")):
            train(models[one], optimizers[one], 2, seed=1)
            train(models[two], optimizers[two], 1, seed=2)
            with torch.no_grad():
                models[one].eval()(batch())
                models[one].train()
            save_checkpoint(tmp_path / one, models[one], optimizers[one])
            load_checkpoint(tmp_path / one, models[two], optimizers[two])
            values = [full(models[dense], optimizers[dense]) for dense in (one, two)]
            assert values[0].keys() == values[1].keys()
            assert all(torch.equal(value, values[1][name]) for name, value in values[0].items() if "norm.r" not in name)

    def full(model: ShardedModel, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {
            f"{name} {place}": one.full_tensor() if hasattr(one, "full_tensor") else one
            for name, place, one in held(model, optimizer)
        }

    ranks(2, rank_main)


def test_files_are_safetensors(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = make("column_wise", "rowwise_adagrad")
    optimizer = adam(model)
    train(model, optimizer, 1, seed=1)
    save_checkpoint(tmp_path / "ckpt", model, optimizer)
    (path,) = (tmp_path / "ckpt").glob("data-*/*.safetensors")
    found = safetensors.load_file(path)
    assert torch.equal(found["model.top.weight"], model.module.top.weight)
    assert torch.equal(found["model.norm.running_var"], model.module.norm.running_var)
    for name, table in model.module.bags.tables().items():
        for place, weight in table.locals.items():
            key = f"model.bags.embedding_bags.{name}.weight"
            names = {key, f"{key}[0:{ROWS[name[2]]}, {place.col_start}:{place.col_end}]"} if place else {key}
            (one,) = names & found.keys()
            assert torch.equal(found[one], weight)


class Two(Click):
    """Two collections."""

    def __init__(self) -> None:
        super().__init__()
        self.more = Click()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_plain_state_dict_comes_and_goes(world_size: int) -> None:
    """By torch's functions, and by the model's own; under FSDP2, too."""

    def rank_main() -> None:
        plain, options = Two(), StateDictOptions(full_state_dict=True, cpu_offload=True)
        sizes = {f"{path}bags.t_{key}": (rows, DIM) for path in ("", "more.") for key, rows in ROWS.items()}
        for cut, dense in zip(CUTS, cycle(["ddp", "fsdp"] if world_size == 2 else ["fsdp", "ddp"])):
            plan: Any = cut_plan(cut, Random(cut), sizes, topologies_of(world_size)[0])
            model = shard(Two(), plan, dense=dense)  # type: ignore[arg-type]
            for set_state in (
                lambda state, model=model: set_model_state_dict(model, state, options=options),
                model.load_state_dict,
            ):
                values = {
                    name: torch.rand(value.shape, generator=torch.Generator().manual_seed(number)).to(value.dtype)
                    for number, (name, value) in enumerate(plain.state_dict().items())
                }
                set_state(dict(values))
                found = get_model_state_dict(model, options=options)
                assert bool(found) == (dist.get_rank() == 0)
                assert not found or found.keys() == values.keys()
                for name, value in found.items():
                    assert torch.equal(value, values[name]), (cut, dense, name)

    ranks(world_size, rank_main)


def test_a_checkpoint_of_torchrec_comes_and_goes(tmp_path: Path) -> None:
    def rank_main() -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel

        torch.manual_seed(1)
        plain = Click()
        theirs = DistributedModelParallel(plain, device=torch.device("cpu"))
        dcp.save(theirs.state_dict(), checkpoint_id=tmp_path / "theirs")
        for cut in CUTS:
            model = make(cut, "none")
            target = model.state_dict()
            dcp.load(target, checkpoint_id=tmp_path / "theirs")
            model.load_state_dict(target)
            dcp.save(model.state_dict(), checkpoint_id=tmp_path / cut)
            back = {name: value for name, value in theirs.state_dict().items()}
            for value in back.values():
                for part in value.local_shards() if hasattr(value, "local_shards") else ():
                    part.tensor.zero_()
            dcp.load(back, checkpoint_id=tmp_path / cut)
            assert {name: whole_of(value) for name, value in back.items()} == {
                name: whole_of(value) for name, value in theirs.state_dict().items()
            }

    def whole_of(value: Any) -> Any:
        parts = value.local_shards() if hasattr(value, "local_shards") else []
        return [part.tensor.tolist() for part in parts] if parts else str(type(value))

    ranks(2, rank_main)


@pytest.mark.some(1)
@pytest.mark.parametrize("optimizer", ["adam", "none"])
def test_loading_takes_no_more_memory_than_the_shards(tmp_path: Path, optimizer: str) -> None:
    """Saved by columns, loaded by rows, and by the same; the peak of the resident memory, which Linux counts."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of the resident memory cannot be reset here")
    rows = dict.fromkeys(ROWS, 150_000)
    total = 3 * sum(rows.values()) * DIM * 4

    def rank_main() -> tuple[int, int]:
        ROWS.update(rows)
        grown = []
        for saved, loaded in (("column_wise", "row_wise"), ("row_wise", "row_wise")):
            model = make(saved, optimizer)
            dense = adam(model)
            train(model, dense, 1, seed=1)
            save_checkpoint(tmp_path / saved, model, dense)
            del model, dense
            model = make(loaded, optimizer)
            dense = adam(model)
            Path("/proc/self/clear_refs").write_text("5")
            before = peak()
            load_checkpoint(tmp_path / saved, model, dense)
            grown.append(peak() - before)
        return max(grown), int(sum(map(len, dense.state.values())))

    for grown, _ in ranks(2, rank_main, timeout=120):
        # An ordinary optimizer's states are made by the load: two thirds of what there is, half of it here.
        states = total // 3 if optimizer == "none" else 0
        assert grown < states + 64 * 2**20, grown


def test_blocks_of_files_are_shared_among_the_ranks(tmp_path: Path) -> None:
    def rank_main(saving: bool) -> list[tuple[str, int]]:
        model = make("row_wise", "adagrad")
        if saving:
            save_checkpoint(tmp_path / "ckpt", model)
        files.BLOCK_BYTES = 512
        seen = []
        verify = files.OpenFile.verify

        def verified(file: files.OpenFile, block: int, buffer: memoryview) -> None:
            seen.append((file._path.name, block))
            verify(file, block, buffer)

        files.OpenFile.verify = verified  # type: ignore[method-assign]
        try:
            save_checkpoint(tmp_path / "small", model) if saving else None
            load_checkpoint(tmp_path / "small", model)
        finally:
            files.OpenFile.verify = verify  # type: ignore[method-assign]
            files.BLOCK_BYTES = 16 * 2**20
        return seen

    ranks(1, rank_main, True)
    of_ranks = ranks(4, rank_main, False)
    blocks = [block for one in of_ranks for block in one]
    saved = json.loads((tmp_path / "small" / "manifest.json").read_text())["files"]
    assert sorted(blocks) == [(file["name"], block) for file in saved for block in range(-(-file["size"] // 512))]
    assert max(map(len, of_ranks)) - min(map(len, of_ranks)) <= 1


def test_large_rows_and_odd_strides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows longer than a block, blocks that end inside a row, and memory that is in no order of a matrix."""
    monkeypatch.setattr(files, "BLOCK_BYTES", 24)
    model = make("grid", "adam")
    weights = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    model.module.top.extra = weights
    model.module.top.empty = torch.nn.Parameter(torch.empty(0, 3))
    model.module.top.scalar = torch.nn.Parameter(torch.tensor(3.0))
    save_checkpoint(tmp_path / "ckpt", model)
    before = whole([held(model, None)])
    monkeypatch.undo()
    monkeypatch.setattr("shardrec.checkpoint.load.BLOCK_BYTES", 8)
    monkeypatch.setattr(files, "BLOCK_BYTES", 24)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_checkpoint(tmp_path / "ckpt", model)
    after = whole([held(model, None)])
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not weights.weight.is_contiguous()


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    """It is saved as a number, and loaded into the tensor that the optimizer and a captured graph know."""
    model = make("row_wise", "adam")
    optimizer = adam(model)
    optimizer.param_groups[0]["lr"] = lr = torch.tensor(0.25)
    train(model, optimizer, 1, seed=1)
    save_checkpoint(tmp_path, model, optimizer)
    lr.fill_(0.5)
    load_checkpoint(tmp_path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] is lr
    assert lr.item() == 0.25
    other = adam(model)
    load_checkpoint(tmp_path, model, other)
    assert other.param_groups[0]["lr"] == 0.25


@pytest.mark.parametrize(
    ("key", "state", "message"),
    [
        (
            "note",
            "slow",
            r"state 'note' of .* is a str. A checkpoint holds tensors and numbers, under names without dots",
        ),
        ("a.b", 1.0, r"state 'a\.b' of .* is a float. A checkpoint holds tensors and numbers"),
        ("block", torch.zeros(1, 2), r"block has shape \(1, 2\) for a shard of shape \(\d+, \d+\)"),
    ],
)
def test_states_that_a_checkpoint_cannot_hold(tmp_path: Path, key: str, state: object, message: str) -> None:
    model = make("table_wise", "none")
    optimizer = adam(model)
    train(model, optimizer, 1, seed=1)
    tables = [parameter for parameter in optimizer.state if parameter.shape[0] in ROWS.values()]
    optimizer.state[tables[0]][key] = state
    with pytest.raises(ConfigError, match=message):
        save_checkpoint(tmp_path / "ckpt", model, optimizer)
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "ckpt", model, optimizer)


def test_extra_data_comes_back_with_its_keys(tmp_path: Path) -> None:
    model = make("table_wise", "none")
    schedulers = [torch.optim.lr_scheduler.MultiStepLR(adam(model), [2, 4], gamma=0.1) for _ in range(2)]
    odd = {1: {"1": [1.5], 1: True}, None: math.inf, "text": {"(pairs)": []}}
    save_checkpoint(tmp_path / "ckpt", model, extra={"scheduler": schedulers[0].state_dict(), "odd": odd})
    extra = load_checkpoint(tmp_path / "ckpt", model)
    assert extra["odd"] == odd
    schedulers[1].load_state_dict(extra["scheduler"])
    assert dict(schedulers[1].milestones) == {2: 1, 4: 1}
    around: list[object] = []
    around.append(around)
    for faulty in ({(1, 2): 3}, {"at": torch.zeros(1)}, {"around": around}):
        with pytest.raises(ConfigError, match=r"extra, .* cannot be written as JSON"):
            save_checkpoint(tmp_path / "other", model, extra=faulty)
    assert not (tmp_path / "other").exists()


def test_settings_that_no_load_would_accept_are_not_saved(tmp_path: Path) -> None:
    model = make("table_wise", "adagrad")
    optimizer = adam(model)
    optimizer.param_groups[0]["clip"] = math.inf
    save_checkpoint(tmp_path / "ckpt", model, optimizer)
    load_checkpoint(tmp_path / "ckpt", model, optimizer)
    assert optimizer.param_groups[0]["clip"] == math.inf
    for group, owner in (
        (optimizer.param_groups[0], "parameter group 0"),
        (model.fused_optimizer.param_groups[0], "the fused optimizer of bags.t_a"),
    ):
        group["clip"] = math.nan
        with pytest.raises(ConfigError, match=f"nothing was saved.*its clip of {owner}.* is nan"):
            save_checkpoint(tmp_path / "other", model, optimizer)
        del group["clip"]
    optimizer.param_groups[0]["betas"] = (torch.tensor(0.9), 0.99)
    with pytest.raises(ConfigError, match=r"an optimizer's settings, cannot be written as JSON.*Tensor"):
        save_checkpoint(tmp_path / "other", model, optimizer)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("update", ["backward", "step"])
def test_the_fused_optimizer_is_not_given_twice(tmp_path: Path, update: str) -> None:
    model = make("table_wise", "rowwise_adagrad", update=update)
    save_checkpoint(tmp_path / "ckpt", model)
    dense = KeyedOptimizerWrapper(
        {name: value for name, value in model.named_parameters() if name.startswith("top")},
        lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    )
    combined = CombinedOptimizer([model.fused_optimizer, dense])
    for given in (model.fused_optimizer, combined, OptimizerWrapper(combined)):
        for call in (save_checkpoint, load_checkpoint):
            with pytest.raises(
                ConfigError, match=rf"is a {type(given).__name__}. The states of model\.fused_optimizer"
            ):
                call(tmp_path / "ckpt", model, given)
    save_checkpoint(tmp_path / "ckpt", model, dense)
    load_checkpoint(tmp_path / "ckpt", model, dense)


def all_in_backward(*, twice: bool = False) -> ShardedModel:
    """The dense part has optimizers in backward, one parameter two of them."""
    torch.manual_seed(0)
    module = Click()
    apply_optimizer_in_backward(torch.optim.SGD, module.norm.parameters(), {"lr": 0.1})
    apply_optimizer_in_backward(torch.optim.Adam, module.top.parameters(), {"lr": 0.1})
    if twice:
        apply_optimizer_in_backward(torch.optim.Adagrad, [module.top.bias], {"lr": 0.2})
    return shard(module)


def test_optimizers_in_backward_of_the_dense_part_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    def rank_main() -> None:
        folder, model, fresh = (
            tmp_path / str(dist.get_world_size()),
            all_in_backward(twice=True),
            all_in_backward(twice=True),
        )
        for _ in range(3):
            model(batch()).square().sum().backward()
        model.module.top.weight._in_backward_optimizers[0].param_groups[0]["lr"] = 0.03
        save_checkpoint(folder, model)
        model(batch()).sum().backward()  # so that it is brought back from other states
        for other in (fresh, model):
            load_checkpoint(folder, other)
        for _ in range(2):
            for other in (fresh, model):
                other(batch()).square().sum().backward()
        for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, theirs)
        assert fresh.module.top.weight._in_backward_optimizers[0].param_groups[0]["lr"] == 0.03

    for world_size in (1, 2):
        ranks(world_size, rank_main)


def test_a_checkpoint_without_the_optimizers_in_backward_that_a_model_has(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "without", shard(Click()))
    model = all_in_backward()
    load_checkpoint(tmp_path / "without", model)  # they have no states yet
    model(batch()).sum().backward()
    with pytest.raises(ConfigError, match=r"it lacks states and settings of the Adam in backward of top\.weight"):
        load_checkpoint(tmp_path / "without", model)
    save_checkpoint(tmp_path / "with", model)
    with pytest.raises(ConfigError, match=r"it has backward\.top\.\w+.*, and the model no such optimizer in backward"):
        load_checkpoint(tmp_path / "with", shard(Click()))


def test_an_optimizer_of_another_model(tmp_path: Path) -> None:
    model = make("table_wise", "none")
    optimizer = adam(model)
    optimizer.add_param_group({"params": [torch.zeros(3, 5, requires_grad=True)]})
    optimizer.state[optimizer.param_groups[-1]["params"][0]]["sum"] = torch.zeros(3, 5)
    with pytest.raises(ConfigError, match=r"a parameter of shape \(3, 5\) that the model lacks"):
        save_checkpoint(tmp_path / "ckpt", model, optimizer)


def test_extra_state_that_is_a_tensor_is_given_to_its_module(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        scale = 1.0

        def get_extra_state(self) -> Tensor:
            return torch.tensor(self.scale)

        def set_extra_state(self, state: Tensor) -> None:
            self.scale = float(state)

    models = [make("table_wise", "adagrad") for _ in range(2)]
    saved, loaded = [Scaled(), Scaled()]
    for model, module in zip(models, (saved, loaded), strict=True):
        model.module.scaled = module
    saved.scale = 3.0
    save_checkpoint(tmp_path, models[0])
    load_checkpoint(tmp_path, models[1])
    assert loaded.scale == 3.0
