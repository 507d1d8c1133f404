"""One rank on CUDA: a training forward does not wait until its batch is checked, and a faulty one changes no weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.checkpoint import save
from shardrec.errors import InputError
from shardrec.exchange import launching
from shardrec.exchange.fault_flags import FaultFlags
from shardrec.layout import ShardingPlan, Topology, cuts
from shardrec.modules import ShardedModel, shard
from shardrec.pipeline import TrainPipeline
from tests.batches import random_bags
from tests.cuda_double import CudaDouble, DeviceTensor, cuda_double, cuda_is_there, to_double
from tests.models import collection

KEYS = ["a", "b", "c"]
ROWS = 9
FLAG = "exchange/fault_flags.py"


class Model(nn.Module):
    """Two collections, and a dense layer above them."""

    def __init__(self, data_type: str = "FP32") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = collection(configs("f", data_type), optimizers="adagrad")
        self.second = collection(configs("s", data_type), optimizers="adagrad")
        self.dense = nn.Linear(2 * 8 * len(KEYS), 1)

    def forward(self, batch: tuple[KeyedJaggedTensor, KeyedJaggedTensor]) -> Tensor:
        values = [self.first(batch[0]).values(), self.second(batch[1]).values()]
        out: Tensor = self.dense(torch.cat(values, dim=1)).sum()
        return out


def configs(prefix: str = "t", data_type: str = "FP32") -> list[EmbeddingBagConfig]:
    sizes: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": 8, "data_type": DataType[data_type]}
    return [EmbeddingBagConfig(name=f"{prefix}{key}", feature_names=[key], **sizes) for key in KEYS]


def plan_of(module: nn.Module) -> ShardingPlan:
    names = [name for name, _ in module.named_parameters() if "embedding_bags." in name]
    tables = [name.removesuffix(".weight").replace("embedding_bags.", "") for name in names]
    return ShardingPlan(topology=Topology(), tables=tuple(cuts.table_wise(table, ROWS, 8, rank=0) for table in tables))


def sharded(device: str = "cuda:0", module: nn.Module | None = None) -> ShardedModel:
    model = Model() if module is None else module
    return shard(model, plan_of(model), device=device)


def a_batch(number: int) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    first, second = (
        random_bags(Random(f"{number} {of}"), dict.fromkeys(KEYS, ROWS), 4, shuffled=False).kjt() for of in range(2)
    )
    return first, second


def there(batch: tuple[KeyedJaggedTensor, KeyedJaggedTensor]) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    return to_double(batch[0]), to_double(batch[1])


def faulty(number: int, *, second: bool = True) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    """With id 9 in the first collection's batch or the second's."""
    batch = list(a_batch(number))
    batch[second] = KeyedJaggedTensor(
        keys=KEYS, values=torch.tensor([1, 2, ROWS]), lengths=torch.tensor([1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0])
    )
    return batch[0], batch[1]


def state(model: ShardedModel) -> dict[str, Tensor]:
    """Copies of weights and optimizer states."""
    tensors = dict(model.named_parameters())
    for number, of_tables in enumerate(model.sharded_collections):
        for name in of_tables.fused_optimizers():
            parts = of_tables.fused_state(name, "sum")
            tensors |= {f"{number} {name} {shard}": part for shard, part in parts.items()}
    return {
        name: (one.inner if isinstance(one, DeviceTensor) else one.detach()).clone() for name, one in tensors.items()
    }


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def double() -> Iterator[CudaDouble]:
    with cuda_is_there(), cuda_double() as double, double.may_wait():
        yield double


@pytest.mark.parametrize("in_order", [True, False])
def test_a_training_forward_launches_little_and_waits_for_nothing(
    double: CudaDouble, in_order: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tables in the order of the output, and in another, which takes one more launch."""
    monkeypatch.setattr(launching, "has_kernels", lambda device: device.type == "cuda")
    tables = configs()
    made = collection(tables, optimizers="adagrad")
    layouts = [cuts.table_wise(config.name, ROWS, 8, rank=0) for config in tables]
    model = shard(made, ShardingPlan(topology=Topology(), tables=tuple(layouts)), device="cuda:0")
    if not in_order:
        monkeypatch.setattr(model.module.step_plan.output, "is_identity", False)  # type: ignore[union-attr]
    for step in range(3):
        features = to_double(a_batch(step)[0])
        double.launches.clear()
        double.waits.clear()
        values = model(features).values()
        launches, waits = dict(double.launches), list(double.waits)
        values.sum().backward()
        if step:  # the first one makes constants for this order of keys
            assert not waits
            assert sum(launches.values()) == (4 if in_order else 5), launches
            assert [line.partition(":")[0] for line in double.waits] == [FLAG]


def test_steps_are_those_on_the_cpu_without_waits_in_forward(double: CudaDouble) -> None:
    on_cpu, on_cuda = sharded("cpu"), sharded()
    for step in range(3):
        given = there(a_batch(step))
        double.waits.clear()
        found = on_cuda(given)
        assert not (step and double.waits)
        expected = on_cpu(a_batch(step))
        found.backward()
        expected.backward()
        assert torch.allclose(found.inner, expected)
    of_cpu = state(on_cpu)
    for name, value in state(on_cuda).items():
        assert torch.allclose(value, of_cpu[name], atol=1e-6), name


FAULTS: dict[str, tuple[list[int], list[int], str]] = {
    "id": ([1, 2, 9], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], "id 9 in sample 2 is outside"),
    "negative id": ([1, 2, -1], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], "id -1 in sample 2 is outside"),
    "too few": ([1, 2], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], "add up to 3 and there are 2 ids"),
    "too many": ([1, 2, 3, 4], [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0], "add up to 3 and there are 4 ids"),
    "negative length": ([1, 2, 3], [3, -1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0], "the length of sample 1 is -1"),
    "overflow": ([1, 2, 3, 4], [2**30, 2**30, 2**30, 2**30, 4, 0, 0, 0, 0, 0, 0, 0], "the length of sample 0 is"),
}


@pytest.mark.some(6)
@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_batch_changes_nothing(
    double: CudaDouble, fault: str, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss is there, its backward raises, also when it is made again, and training goes on."""
    if has_kernel:
        monkeypatch.setattr(launching, "has_kernels", lambda device: device.type == "cuda")
    ids, lengths, words = FAULTS[fault]
    bad = KeyedJaggedTensor(keys=KEYS, values=torch.tensor(ids), lengths=torch.tensor(lengths, dtype=torch.int32))
    on_cpu, model = sharded("cpu"), sharded()
    model(there(a_batch(0))).backward()
    model.zero_grad()
    before = state(model)
    loss = model(there((a_batch(1)[0], bad)))
    for _ in range(2):
        with pytest.raises(InputError, match=words):
            loss.backward(retain_graph=True)
        assert are_equal(state(model), before)
        assert all(weight.grad is None for weight in model.dense_parameters())
    model(there(a_batch(2))).backward()
    for step in (0, 2):
        on_cpu.zero_grad()
        on_cpu(a_batch(step)).backward()
    of_cpu = state(on_cpu)
    for name, value in state(model).items():
        assert torch.allclose(value, of_cpu[name], atol=1e-6), name


def test_another_backward_does_not_pass_it_over(double: CudaDouble) -> None:
    """Of two forwards, the backward of the sound one comes first; then each has its own."""
    model = sharded(module=collection(configs(), optimizers="adagrad"))
    (_, bad), (good, _) = faulty(0), a_batch(0)
    model.context.step.reads_flags_late = True  # as in one forward
    losses = [model.module(to_double(one)).values().sum() for one in (good, bad)]
    before = state(model)
    with pytest.raises(InputError, match="id 9"):
        losses[0].backward()
    with pytest.raises(InputError, match="id 9"):
        losses[1].backward()
    assert are_equal(state(model), before)
    losses[0].backward()
    assert not are_equal(state(model), before)


READERS: dict[str, Callable[[ShardedModel, Path], Any]] = {
    "forward": lambda model, _: model(there(a_batch(5))),
    "evaluation": lambda model, _: model.eval()(there(a_batch(5))),
    "state_dict": lambda model, _: model.state_dict(),
    "save": lambda model, folder: save.save_checkpoint(folder / "saved", model),
}


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_the_flag_where_no_backward_does(double: CudaDouble, reader: str, tmp_path: Path) -> None:
    """Once; then all goes on."""
    model = sharded()
    model(there(faulty(0, second=False)))
    with pytest.raises(InputError, match="id 9"):
        READERS[reader](model, tmp_path)
    READERS[reader](model, tmp_path)


def test_forwards_without_backward_are_read_before_their_flags_are_used_again(double: CudaDouble) -> None:
    model = sharded(module=collection(configs(), optimizers="adagrad"))
    good, bad = to_double(a_batch(0)[0]), to_double(faulty(0)[1])
    step = model.context.step
    step.reads_flags_late = True
    model.module(bad)
    with pytest.raises(InputError, match="id 9"):
        for _ in range(64):
            model.module(good)
    assert len(model.context.headers.flags.unread) == 63


def test_flags_of_inference_and_of_training(double: CudaDouble) -> None:
    """They share memory, which inference mode may have made."""
    flags = FaultFlags(torch.device("cuda", 0))
    with torch.inference_mode():
        first = flags.next()
    for flag, is_up in ((first, True), (flags.next(), False), (flags.next(), True)):
        flag.put_up(torch.tensor(is_up, device="cuda"))
        flag.send(lambda: None)
        assert flag.is_up() == is_up


def test_a_batch_that_was_written_to_meanwhile(double: CudaDouble) -> None:
    model = sharded()
    batch = there(faulty(0))
    loss = model(batch)
    batch[1].values().zero_()
    with pytest.raises(InputError, match="its tensors have been changed since"):
        loss.backward()


@pytest.mark.parametrize("how", ["no_grad", "outside", "frozen", "bfloat16", "in backward", "a hook"])
def test_where_the_forward_waits(double: CudaDouble, how: str) -> None:
    """No backward of the lookup's own would read the flag in time."""
    module = Model("BF16" if how == "bfloat16" else "FP32")
    if how == "frozen":
        for weight in (*module.first.parameters(), *module.second.parameters()):
            weight.requires_grad_(False)
    model = sharded(module=module)
    if how == "in backward":
        apply_optimizer_in_backward(torch.optim.SGD, model.module.dense.parameters(), {"lr": 0.1})  # type: ignore[union-attr]
    if how == "a hook":
        model.module.dense.bias.register_post_accumulate_grad_hook(lambda bias: None)  # type: ignore[union-attr]
    before = state(model)
    bad = there(faulty(0, second=False))
    with pytest.raises(InputError, match="id 9"):
        if how == "no_grad":
            with torch.no_grad():
                model(bad)
        elif how == "outside":
            model.module.first(bad[0])  # type: ignore[union-attr, operator]
        else:
            model(bad)
    assert are_equal(state(model), before)


def test_optimizers_in_backward_that_come_later(double: CudaDouble) -> None:
    model = sharded()
    model(there(a_batch(0))).backward()
    apply_optimizer_in_backward(torch.optim.SGD, model.module.dense.parameters(), {"lr": 0.1})  # type: ignore[union-attr]
    before = state(model)
    with pytest.raises(InputError, match="id 9"):
        model(there(faulty(0)))
    assert are_equal(state(model), before)


@pytest.mark.some(4)
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("bad_one", [0, 2, 3])
def test_pipelines_train_on_the_batches_before_a_faulty_one(double: CudaDouble, depth: int, bad_one: int) -> None:
    """And on those after it, as the plain loop."""

    def train(device: str) -> tuple[ShardedModel, list[int]]:
        model = sharded(device)
        batches = [faulty(step) if step == bad_one else a_batch(step) for step in range(4)]
        given = batches if device == "cpu" else [there(batch) for batch in batches]
        optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1)
        pipeline = TrainPipeline(model, optimizer, given, depth=depth)
        raised, step = [], 0
        while True:
            try:
                next(pipeline)
            except StopIteration:
                return model, raised
            except InputError:
                raised.append(step)
            step += 1

    expected, when = train("cpu")
    found, also = train("cuda:0")
    assert (when, also) == ([bad_one], [bad_one])
    of_cpu = state(expected)
    for name, value in state(found).items():
        assert torch.allclose(value, of_cpu[name], atol=1e-5), name


@pytest.mark.parametrize("close", [True, False])
def test_the_end_of_a_pipeline_reads_the_flags(double: CudaDouble, close: bool) -> None:
    """Of a batch whose backward does not reach its lookups."""
    model = sharded()
    optimizer = torch.optim.SGD(model.dense_parameters(), lr=0.1)

    def loss_fn(model: nn.Module, batch: object) -> Tensor:
        return model(batch).detach() + model.module.dense.bias.sum()  # type: ignore[union-attr, operator]

    pipeline = TrainPipeline(model, optimizer, [faulty(0)], loss_fn=loss_fn)
    next(pipeline)
    with pytest.raises(InputError, match="id 9"):
        if close:
            pipeline.close()
        else:
            next(pipeline)
