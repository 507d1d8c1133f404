"""What is scripted in a model's place, and that the model itself stays as it is."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import KeyedTensor

import shardrec
from shardrec.pending import Await
from tests.scripting.lookups import WIDTH, Bags, batch, check, events_of, script

ROOT = Path(__file__).parents[2]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = Bags("bags")
        self.top = nn.Linear(WIDTH, 1)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.top(self.bags(x).values()) + self.shift


def test_the_model_is_not_changed() -> None:
    model = Model()
    before = {module: (type(module), copy.copy(vars(module))) for module in model.modules()}
    script(model)
    assert {module: (type(module), vars(module)) for module in model.modules()} == before
    assert not hasattr(model.top, "__overloads__")


def test_parameters_buffers_and_names_are_the_models() -> None:
    model = Model()
    scripted = script(model)
    mine, its = dict(model.state_dict(keep_vars=True)), dict(scripted.state_dict(keep_vars=True))
    assert list(its) == list(mine)
    assert {name: value.data_ptr() for name, value in its.items()} == {k: v.data_ptr() for k, v in mine.items()}
    x = batch()
    scripted(x).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(gradients, [parameter.grad for parameter in model.parameters()], rtol=0, atol=0)


def test_train_and_eval() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = Bags("bags")
            self.drop = nn.Dropout(1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.drop(self.bags(x).values())

    model, x = Dropping(), batch()
    scripted = script(model)
    assert not scripted(x).any()
    assert torch.equal(scripted.eval()(x), model.eval()(x))
    assert torch.equal(script(model)(x), model(x))


def test_scripted_again_it_is_as_before() -> None:
    """TorchScript gives modules of one class one type, whose graphs have been changed the first time."""

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.other = Bags("other")

        def forward(self, x: Tensor) -> Tensor:
            first = self.inner(x)
            other = self.other(x)
            return first.values() + other.values()

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = Bags("bags")

        def forward(self, x: Tensor) -> KeyedTensor:
            return self.bags(x)

    inner = Inner()
    check(inner, batch())
    check(Outer(inner), batch())
    check(Outer(inner), batch())
    check(inner, batch())


def test_submodules_by_themselves_wait_late_too() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Bags("a"), Bags("b")

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x)
            return self.b(x).values() + a.values()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = Tower()

        def forward(self, x: Tensor) -> Tensor:
            return self.tower(x)

    model = Outer()
    scripted = script(model)
    assert events_of(scripted.tower, batch())[1] == ["issue a", "issue b", "wait b", "wait a"]
    pending = scripted.tower.a.issue(batch())
    assert isinstance(pending, torch._C._Await)
    assert shardrec.wait(pending).keys() == ["f", "g"]


class Wrapper(nn.Module):
    """Like ShardedModel: passes all on, and is not there in the scripted model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def scripted_twin(self) -> nn.Module:
        return self.module


def test_wrappers_give_way_to_what_they_wrap() -> None:
    for model in (Wrapper(Model()), Wrapper(Wrapper(Bags("bags"))), nn.Sequential(Wrapper(Bags("bags")))):
        check(model, batch())


def test_distributed_data_parallel_gives_way(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Model()
        wrapped, x = DistributedDataParallel(model), batch()
        assert torch.equal(script(wrapped)(x), model(x))
    finally:
        torch.distributed.destroy_process_group()


def finish(x: Tensor, scale: float, shift: int, bias: Tensor | None) -> Tensor:
    y = x * scale + shift
    return y if bias is None else y + bias


class Signature(nn.Module):
    """Its own twin; parameters of all kinds."""

    def forward(self, x: Tensor, scale: float = 2.0, *, shift: int, bias: Tensor | None) -> Await[Tensor]:
        return shardrec.pending.awaitable(finish, x, scale, shift, bias)

    def scripted_twin(self) -> nn.Module:
        return self


def test_defaults_and_keywords() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Signature()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, shift=1, bias=None) + self.inner(x, 3.0, bias=x, shift=2)

    x = batch()
    assert torch.equal(script(Caller())(x), (2 * x + 1) + (3 * x + 2 + x))


class Nested(nn.Module):
    """A twin with a submodule that has a twin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Signature()

    def forward(self, x: Tensor) -> Await[Tensor]:
        return shardrec.pending.awaitable(finish, self.inner(x, shift=1, bias=None), 10.0, 0, None)

    def scripted_twin(self) -> nn.Module:
        return self


def maybe(x: Tensor) -> Tensor | None:
    return x + 1 if bool((x > 0).any()) else None


class Maybe(nn.Module):
    def forward(self, x: Tensor) -> Await[Tensor | None]:
        return shardrec.pending.awaitable(maybe, x)

    def scripted_twin(self) -> nn.Module:
        return self


def test_an_await_of_an_optional_is_waited_for_at_once() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maybe = Maybe()

        def forward(self, x: Tensor) -> Tensor:
            found = self.maybe(x)
            return x if found is None else found

    scripted = script(Caller())
    for x in (torch.ones(2), -torch.ones(2)):
        assert torch.equal(scripted(x), x if maybe(x) is None else x + 1)


def test_twins_in_twins() -> None:
    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Nested()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) + 1

    x = batch()
    assert torch.equal(script(Caller())(x), (2 * x + 1) * 10 + 1)


def test_modules_that_are_scripted_already() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = Bags("bags")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                self.top = torch.jit.script(nn.Linear(WIDTH, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.bags(x).values())

    check(Outer(), batch())


class Delayed(nn.Module):
    def forward(self, x: Tensor) -> Await[KeyedTensor]:
        return shardrec.pending.awaitable(to_keyed, x)

    def scripted_twin(self) -> nn.Module:
        return self


def to_keyed(x: Tensor) -> KeyedTensor:
    return KeyedTensor(["f", "g"], [2, 2], x * 2)


class Later(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Delayed(), Delayed()

    def forward(self, x: Tensor) -> Tensor:
        held = [self.first(x), self.second(x + 1)]
        return shardrec.wait(held[0])["f"] + held[1]["g"]


def test_a_saved_model_needs_torch_only_and_so_do_stages(tmp_path: Path) -> None:
    """In one process, for which importing torch takes most of the time."""
    file, x = tmp_path / "model.pt", torch.arange(4.0)[None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.save(shardrec.script(Later()), file)
    code = (
        "import sys, torch\n"
        "model = torch.jit.load(sys.argv[1])\n"
        "print(model(torch.arange(4.0)[None]).tolist())\n"
        "print({'shardrec', 'torchrec', 'fbgemm_gpu'} & set(sys.modules))\n"
        "import shardrec.pipeline\n"
        "print({'torchrec', 'fbgemm_gpu'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str((2 * x[:, :2] + 2 * (x[:, 2:] + 1)).tolist()), "set()", "set()"]


def test_nothing_pending_at_all() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, 2), nn.ReLU()), batch()
    assert torch.equal(script(model)(x), model(x))


def test_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardrec.script(Later())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        shardrec.script(Later())
        torch.jit.script(double)
    assert [str(each.message).split()[0] for each in seen] == ["`torch.jit.script`"]


def double(x: Tensor) -> Tensor:
    return 2 * x
