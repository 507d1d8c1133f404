"""A pipeline of several devices in one process gives what the sequential gives."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardrec.errors import ConfigError
from shardrec.pending import LazyAwaitable
from shardrec.pipeline import Pipeline, PipelineError
from shardrec.pipeline.skip import pop, skippable, stash
from tests.pipeline.networks import BrokenBackward, Counts, Fails, failures_told, nested, network, two_skips
from tests.pipeline.skip.layers import popping, stashing


def batch(samples: int = 10) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(samples, size, generator=generator).double() for size in (4, 2))  # type: ignore[return-value]


def same_gradients(model: nn.Module, pipeline: nn.Module) -> None:
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    torch.testing.assert_close({name: one.grad for name, one in pipeline.named_parameters()}, wanted)


@given(
    st.sampled_from([[8], [1, 7], [3, 1, 4], [2, 2, 2, 2], [1] * 8]),
    st.integers(1, 12),
    st.integers(1, 7),
    st.sampled_from(["gpipe", "1f1b"]),
    st.sampled_from(["always", "except_last", "never"]),
    st.sampled_from(["mean", "sum"]),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_loss_gradients_and_outputs_are_the_sequential_s(
    balance: list[int], chunks: int, samples: int, schedule: Any, checkpoint: Any, reduction: Any, in_turn: bool
) -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return mse_loss(output, target, reduction=reduction)

    model, (x, y) = network(), batch(samples)
    pipeline = Pipeline(copy.deepcopy(model), balance, chunks=chunks, schedule=schedule, checkpoint=checkpoint)
    if in_turn:
        pipeline.threads = lambda: None  # type: ignore[method-assign]  # as on CUDA
    loss = loss_fn(model(x), y)
    loss.backward()
    torch.testing.assert_close(pipeline.step(x, y, loss_fn=loss_fn, reduction=reduction), loss.detach())
    same_gradients(model, pipeline)
    for one in (model, pipeline):
        one.zero_grad()
    mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss_fn(model(theirs), y).backward()
    loss_fn(pipeline(mine), y).backward()
    same_gradients(model, pipeline)
    torch.testing.assert_close(mine.grad, theirs.grad)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(x), model(x))


@pytest.mark.parametrize("make", [two_skips, nested])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_namespaces_nests_and_none(make: Callable[[], nn.Sequential], checkpoint: Any) -> None:
    model, (x, _) = make(), batch()
    pipeline = Pipeline(copy.deepcopy(model), [1] * len(model), chunks=3, checkpoint=checkpoint)
    if make is two_skips:
        torch.testing.assert_close(pipeline(x), model(x))
    else:  # counts samples within a micro-batch
        torch.testing.assert_close(pipeline(x), torch.cat([model(part) for part in (x[:4], x[4:7], x[7:])]))
    pipeline.step(x, loss_fn=lambda output, _: output.square().mean())
    assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_none_in_input_and_output_takes_no_gradient() -> None:
    class Apart(nn.Module):
        def forward(self, input: tuple[None, Tensor]) -> tuple[None, Tensor, Tensor]:
            return None, input[1] * 2, input[1].detach()

    x = torch.ones(3, 1, requires_grad=True)
    none, doubled, same = Pipeline(nn.Sequential(nn.Identity(), Apart()), [1, 1], chunks=2, checkpoint="never")(
        (None, x)
    )
    assert none is None
    assert not same.requires_grad
    doubled.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[2.0]] * 3


def test_gradients_of_an_input_cut_in_pieces_are_put_in_its_order() -> None:
    class Weigh(nn.Module):
        def forward(self, input: tuple[KeyedJaggedTensor, Tensor]) -> Tensor:
            features, x = input
            weighed = features.weights() * features.values()
            return weighed.view(2, -1).t() + (x if int(features.values()[0]) == 1 else x.detach())

    weights, x = torch.ones(6, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    ids, lengths = torch.arange(1, 7), torch.ones(6, dtype=torch.int32)
    features = KeyedJaggedTensor(keys=["a", "b"], values=ids, lengths=lengths, weights=weights)
    pipeline = Pipeline(nn.Sequential(Weigh(), nn.Identity()), [1, 1], chunks=3, checkpoint="never")
    pipeline((features, x)).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [1, 2, 3, 4, 5, 6]
    assert x.grad is not None
    assert x.grad.tolist() == [[2], [0], [0]]


def test_a_pipeline_s_input_may_be_in_a_graph() -> None:
    before, model, (x, y) = nn.Linear(4, 4).double(), network(), batch()
    pipeline = Pipeline(copy.deepcopy(model), [4, 4], chunks=3)
    mse_loss(model(before(x)), y).backward()
    wanted, before.weight.grad = before.weight.grad, None
    pipeline.step(before(x), y, loss_fn=mse_loss)
    torch.testing.assert_close(before.weight.grad, wanted)


def test_an_awaitable_is_waited_for_when_it_leaves_its_stage() -> None:
    order: list[str] = []

    class Late(LazyAwaitable[Tensor]):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.value = value

        def _wait_impl(self) -> Tensor:
            order.append("waited")
            return self.value * 3

    class First(nn.Module):
        def forward(self, input: Tensor) -> Any:
            yield stash("lazy", Late(input))
            order.append("forward")
            return input

    class Last(nn.Module):
        def forward(self, input: Tensor) -> Any:
            lazy = yield pop("lazy")
            return input + lazy

    model = nn.Sequential(skippable(stash=["lazy"])(First)(), nn.Identity(), skippable(pop=["lazy"])(Last)())
    x = torch.ones(2, 1, requires_grad=True)
    Pipeline(model, [1, 1, 1], checkpoint="never")(x).sum().backward()
    assert order == ["forward", "waited"]
    assert x.grad is not None
    assert x.grad.tolist() == [[4.0], [4.0]]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_no_skip_is_alive_after_a_step_or_longer_than_its_forward(schedule: Any, checkpoint: Any) -> None:
    alive: list[weakref.ref[Tensor]] = []

    class First(nn.Module):
        def forward(self, input: Tensor) -> Any:
            skip = input * 1
            alive.append(weakref.ref(skip))
            yield stash("x", skip)
            del skip
            return input

    class Last(nn.Module):
        def forward(self, input: Tensor) -> Any:
            skip = yield pop("x")
            alive.append(weakref.ref(skip))
            return input + skip

    layers = [nn.Linear(4, 4), skippable(stash=["x"])(First)(), nn.Linear(4, 4), skippable(pop=["x"])(Last)()]
    pipeline = Pipeline(nn.Sequential(*layers).double(), [2, 1, 1], chunks=3, schedule=schedule, checkpoint=checkpoint)
    gc.disable()
    try:
        pipeline.step(batch()[0], loss_fn=lambda output, _: output.square().mean())
        assert alive
        assert [ref() for ref in alive if ref() is not None] == []
        with torch.no_grad():
            pipeline(batch()[0])
        assert [ref() for ref in alive if ref() is not None] == []
        # With a graph: neither layer's backward needs the values, so that nothing keeps them until then.
        output = pipeline(batch()[0])
        if checkpoint == "never":
            assert [ref() for ref in alive if ref() is not None] == []
        output.sum().backward()
        assert [ref() for ref in alive if ref() is not None] == []
    finally:
        gc.enable()


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_an_exception_reaches_the_caller_and_the_next_batch_works(at: int, schedule: Any) -> None:
    x, y = batch()
    layers: list[nn.Module] = [nn.Linear(4, 2), nn.Tanh(), nn.Tanh()]
    fails, breaks = Fails(), BrokenBackward()
    layers[at] = nn.Sequential(layers[at], fails, breaks)
    model = nn.Sequential(*layers).double()
    pipeline = Pipeline(copy.deepcopy(model), [1, 1, 1], chunks=4, schedule=schedule)
    fails, breaks = pipeline[at][1], pipeline[at][2]  # type: ignore[index]
    for error in (ValueError("on purpose"), KeyboardInterrupt("on purpose")):
        fails.error = error
        with pytest.raises(type(error), match="on purpose") as caught:
            pipeline.step(x, y, loss_fn=mse_loss)
        assert "networks.py" in {entry.path.name for entry in caught.traceback}  # type: ignore[union-attr]
        with pytest.raises(type(error), match="on purpose"), torch.no_grad():
            pipeline(x)
    fails.error = None
    breaks.broken = True
    with pytest.raises(ValueError, match="backward fails on purpose"):
        pipeline.step(x, y, loss_fn=mse_loss)
    with pytest.raises(ValueError, match="backward fails on purpose"):
        pipeline(x).sum().backward()
    breaks.broken = False
    for one in (model, pipeline):
        one.zero_grad()
    mse_loss(model(x), y).backward()
    pipeline.step(x, y, loss_fn=mse_loss)
    same_gradients(model, pipeline)


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("train", [True, False])
def test_other_stages_stop_once_they_are_told_of_a_failure(in_turn: bool, train: bool) -> None:
    """The last stage fails at the first micro-batch; stages in turn have begun the second of twenty by then."""
    with failures_told() as told:
        first, fails = Counts(told), Fails()
        fails.error = ValueError("on purpose")
        pipeline = Pipeline(nn.Sequential(nn.Linear(4, 2), first, fails), [1, 1, 1], chunks=20)
        if in_turn:
            first.waiting = 21
            pipeline.threads = lambda: None  # type: ignore[method-assign]  # as on CUDA
        x = torch.randn(20, 4)
        with pytest.raises(ValueError, match="on purpose"):
            pipeline.step(x, loss_fn=lambda output, _: output.sum()) if train else pipeline(x)
    assert first.count <= 2


def test_what_is_no_tensor_is_refused_between_stages() -> None:
    class Number(nn.Module):
        def forward(self, input: Tensor) -> Any:
            return input, len(input)

    pipeline = Pipeline(nn.Sequential(nn.Linear(4, 2), Number(), nn.Identity()), [2, 1], chunks=2)
    with pytest.raises(TypeError, match="the output of stage 0 holds a int: between stages go tensors, None, and"):
        pipeline(batch()[0].float())


def test_a_fault_of_the_loss_or_the_target() -> None:
    x, y = batch()
    pipeline = Pipeline(network(), [4, 4], chunks=2)
    with pytest.raises(ConfigError, match=r"loss_fn returned torch.float64 \(5, 2\): it has to return one"):
        pipeline.step(x, y, loss_fn=lambda output, _: output)
    with pytest.raises(ConfigError, match="the target has 9 samples and the input has 10"):
        pipeline.step(x, y[1:], loss_fn=mse_loss)
    with pytest.raises(ConfigError, match=r"reduction is 'none'"):
        pipeline.step(x, y, loss_fn=mse_loss, reduction="none")  # type: ignore[arg-type]
    pipeline.step(x, y, loss_fn=mse_loss)


def test_a_stashed_tensor_changed_in_place_is_refused() -> None:
    x = torch.ones(4, 1)
    for layers, balance in (
        ([stashing("a"), nn.ReLU(inplace=True), nn.Identity(), popping("a")], [2, 1, 1]),
        ([stashing("a"), nn.Identity(), nn.ReLU(inplace=True), popping("a")], [2, 1, 1]),
        ([stashing("a"), nn.Identity(), nn.ReLU(inplace=True), popping("a")], [2, 2]),
    ):
        pipeline = Pipeline(nn.Sequential(*layers), balance)
        with torch.no_grad(), pytest.raises(PipelineError, match="stashed as 'a' was changed in place"):
            pipeline(x)


def test_an_input_changed_in_place_cannot_be_computed_again() -> None:
    layers = [nn.Linear(1, 1), nn.ReLU(inplace=True), nn.Linear(1, 1)]
    x = torch.ones(4, 1)
    with pytest.raises(PipelineError, match=r"stage 1 changes its input in place.*checkpoint='never'"):
        Pipeline(nn.Sequential(*layers), [1, 2], checkpoint="always")(x)
    Pipeline(nn.Sequential(*layers), [1, 2], checkpoint="never")(x).sum().backward()
    Pipeline(nn.Sequential(*layers), [2, 1], checkpoint="always")(x).sum().backward()


def test_an_input_changed_in_place_is_no_fault_of_the_other_micro_batches() -> None:
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)).double()
    pipeline = Pipeline(copy.deepcopy(model), [1, 1], chunks=3, checkpoint="never")
    x, y = batch()
    mse_loss(model(x.clone()), y).backward()
    pipeline.step(x, y, loss_fn=mse_loss)
    same_gradients(model, pipeline)
    assert (x >= 0).all()


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("by_step", [True, False])
def test_an_input_changed_in_place_gives_no_wrong_gradient_before_the_pipeline(chunks: int, by_step: bool) -> None:
    class Double(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input.mul_(2)

    def go_back(before: Callable[[Tensor], Tensor]) -> Tensor | None:
        weight = torch.ones(3, 1, requires_grad=True)
        pipeline = Pipeline(nn.Sequential(Double(), nn.Identity()), [1, 1], chunks=chunks, checkpoint="never")
        if by_step:
            pipeline.step(before(weight), loss_fn=lambda output, _: output.sum(), reduction="sum")
        else:
            pipeline(before(weight)).sum().backward()
        return weight.grad

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        go_back(torch.tanh)  # whose gradient needs its output
    assert torch.equal(go_back(lambda weight: weight + 1), torch.full((3, 1), 2.0))


def test_outputs_with_other_numbers_of_rows_go_back_where_they_came_from() -> None:
    class Positive(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            return input[input[:, 0] > 0]

    pipeline = Pipeline(nn.Sequential(nn.Identity(), Positive()), [1, 1], chunks=2)
    x = torch.tensor([[1.0, 2.0], [-3.0, 4.0], [5.0, 6.0], [7.0, 8.0]], requires_grad=True)
    (pipeline(x) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[1, 1], [0, 0], [2, 2], [3, 3]]


def test_an_output_goes_back_once() -> None:
    output = Pipeline(network(), [4, 4])(batch()[0])
    output.sum().backward(retain_graph=True)
    with pytest.raises(PipelineError, match="goes back once: call forward again"):
        output.sum().backward()


def test_modes_of_the_caller_hold_in_all_stages() -> None:
    seen: list[tuple[bool, bool, torch.dtype]] = []

    class Look(nn.Module):
        def forward(self, input: Tensor) -> Tensor:
            seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (input @ input.t()).dtype))
            return input

    pipeline = Pipeline(nn.Sequential(Look(), Look()), [1, 1], checkpoint="never")
    with torch.no_grad():
        pipeline(torch.ones(2, 2))
    with torch.inference_mode():
        pipeline(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pipeline(torch.ones(2, 2))
    float32, half = torch.float32, torch.bfloat16
    assert seen == 2 * [(False, False, float32)] + 2 * [(False, True, float32)] + 2 * [(True, False, half)]


def test_modules_stay_what_they_were() -> None:
    model = network()
    pipeline = Pipeline(copy.deepcopy(model), [4, 4], chunks=2)
    assert list(pipeline.state_dict()) == list(model.state_dict())
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert len(pipeline) == 8
    assert [type(layer) for layer in pipeline] == [type(layer) for layer in model]
    x, y = batch()
    pipeline.step(x, y, loss_fn=mse_loss)
    for other in (copy.deepcopy(pipeline), pickle.loads(pickle.dumps(pipeline))):
        torch.testing.assert_close(other(x), pipeline(x))
        assert other[0].weight is not pipeline[0].weight
    assert pipeline.float()[0].weight.dtype == torch.float32
    with pytest.raises(ConfigError, match="stages of a pipeline are on cpu, cpu and cannot be moved"):
        pipeline.to("meta")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": ["cpu"]}, r"2 stages and devices are \['cpu'\]: give a device for each stage"),
        ({"chunks": 0}, r"chunks is 0: give the number of micro-batches"),
        ({"schedule": "zb"}, r"schedule is 'zb': give one of 'gpipe', '1f1b'"),
        ({"checkpoint": "sometimes"}, r"checkpoint is 'sometimes': give one of 'always', 'except_last', 'never'"),
    ],
)
def test_options_that_cannot_be(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Pipeline(network(), [4, 4], **options)


def test_a_layer_may_not_have_a_name_of_the_pipeline_s_own() -> None:
    with pytest.raises(ConfigError, match=r"a layer is named 'stages', which is a name of the pipeline's own"):
        Pipeline(nn.Sequential(OrderedDict(stages=nn.Linear(1, 1))), [1])


def test_a_layer_that_comes_twice_is_there_twice() -> None:
    layer = nn.Linear(1, 1)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    pipeline = Pipeline(model, [3])
    assert list(pipeline) == list(model)
    assert pipeline[-1] is layer
    x = torch.ones(2, 1)
    torch.testing.assert_close(pipeline(x), model(x))


def test_skips_are_verified_when_a_module_is_wrapped() -> None:
    with pytest.raises(TypeError, match="layer '0' stashes 'a', which no layer pops"):
        Pipeline(nn.Sequential(stashing("a"), nn.ReLU()), [1, 1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_stages_on_a_gpu() -> None:
    model, (x, y) = network(), batch()
    pipeline = Pipeline(copy.deepcopy(model), [3, 5], devices=["cuda:0", "cpu"], chunks=3)
    mse_loss(model(x), y).backward()
    pipeline.step(x, y, loss_fn=mse_loss)
    for expected, parameter in zip(model.parameters(), pipeline.parameters(), strict=True):
        assert torch.allclose(parameter.grad.cpu(), expected.grad, atol=1e-5)
