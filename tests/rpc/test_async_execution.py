"""Every form of ``torch.distributed.rpc.functions.async_execution``, and pending values of RPCs."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import rpc
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

import shardrec
from shardrec.pending import as_lazy
from shardrec.rpc import EmbeddingServer, RpcWorld
from shardrec.rpc.messages import unwrapped
from tests.ranks import ranks
from tests.rpc import forms
from tests.rpc.jobs import make_model, make_plan


def _world(path: str, work: Any) -> Any:
    """``work`` on the first of three workers, which are a trainer and two servers without tables."""
    rank = dist.get_rank()
    name = ["trainer0", "server0", "server1"][rank]
    world = RpcWorld(dist.FileStore(path), trainers=1, servers=2, name=name, timeout_s=30.0)
    if rank:
        world.serve()
        return None
    with world.joined():
        try:
            return work()
        finally:
            world.end()


@pytest.fixture
def fresh_ranks() -> None:
    """Remote references know the first RPC agent of their process alone: take processes that had none."""
    ranks(3, lambda: os._exit(0), expect_death={0, 1, 2})


@pytest.mark.usefixtures("fresh_ranks")
def test_every_form(tmp_path: Any) -> None:
    def work() -> dict[str, Any]:
        x = torch.arange(3.0)
        form = forms.Forms
        ref = rpc.remote("server0", form, args=(10.0,))
        found: dict[str, Any] = {
            "free function": rpc.rpc_sync("server0", forms.by_hand, args=(x,)),
            "then": rpc.rpc_sync("server0", forms.by_then, args=(x,)),
            "over three workers": rpc.rpc_sync("server0", forms.over_another, args=("server1", x)),
            "static method": rpc.rpc_sync("server0", form.static, args=(x,)),
            "class method": rpc.rpc_sync("server0", form.of_class, args=(x,)),
            "rpc_sync of a reference": ref.rpc_sync().bound(x),
            "rpc_async of a reference": ref.rpc_async().bound(x).wait(),
            "remote of a reference": ref.remote().bound(x).to_here(),
            "static method of a reference": ref.rpc_sync().static(x),
            "class method of a reference": ref.rpc_sync().of_class(x),
            "by the worker itself": rpc.rpc_sync("trainer0", forms.by_then, args=(x,)),
            "worker to worker and back": rpc.rpc_sync("server0", forms.over_another, args=("server0", x)),
            "scripted function": rpc.rpc_sync("server0", forms.scripted, args=("server1", x)),
            "caller is scripted": forms.scripted_caller("server0", "server1", x),
        }
        for name, function in {
            "raises": forms.fails,
            "by hand": forms.fails_by_hand,
            "no Future": forms.no_future,
        }.items():
            try:
                rpc.rpc_sync("server0", function, args=(x,))
                found[name] = ""
            except (RuntimeError, ValueError) as error:
                found[name] = str(error)
        return found

    found = ranks(3, lambda: _world(str(tmp_path / "store"), work))[0]
    one = torch.arange(3.0) + 1
    for name in ("free function", "then", "static method", "class method", "static method of a reference"):
        assert torch.equal(found.pop(name), one), name
    assert torch.equal(found.pop("class method of a reference"), one)
    for name in ("rpc_sync of a reference", "rpc_async of a reference", "remote of a reference"):
        assert torch.equal(found.pop(name), one + 9), name
    assert torch.equal(found.pop("by the worker itself"), one)
    for name in ("over three workers", "worker to worker and back"):
        assert torch.equal(found.pop(name), one + 1), name
    assert torch.equal(found.pop("scripted function"), one + 1)
    assert torch.equal(found.pop("caller is scripted"), 2 * (one + 1))
    assert "the row is not here" in found.pop("raises")
    assert "the row is not there" in found.pop("by hand")
    assert "must return a torch.futures.Future object, but got builtins.int" in found.pop("no Future")
    assert not found


@pytest.mark.usefixtures("fresh_ranks")
def test_a_server_behind_a_reference_and_pending_values(tmp_path: Any) -> None:
    def work() -> list[Any]:
        ref = rpc.remote("server0", forms.make_server)
        request = [(9, [0, 0, 0], torch.zeros(0, dtype=torch.int32))]
        answers = [ref.rpc_sync().lookup([]), ref.rpc_async().lookup([]).wait(), ref.remote().lookup([]).to_here()]
        refused = ref.rpc_sync().lookup(request)
        x = torch.arange(3.0)
        future = rpc.rpc_async("server1", forms.by_hand, args=(x,))
        lazy = as_lazy(future)
        local: Future[Tensor] = Future()
        total = shardrec.pending.gather(lazy, shardrec.pending.fork(torch.neg, x), lazy.then(torch.sum), local, 5)
        early = total.done()
        local.set_result(x)
        failing = shardrec.pending.as_lazy(rpc.rpc_async("server1", forms.fails, args=(x,)))
        with pytest.raises(ValueError, match="the row is not here"):
            shardrec.pending.gather(x, failing).wait()
        return [answers, refused, early, [shardrec.wait(one) for one in total], torch.add(lazy, 1)]

    answers, refused, early, gathered, added = ranks(3, lambda: _world(str(tmp_path / "store"), work))[0]
    assert all(unwrapped(one, "s").numel() == 0 for one in answers)
    assert refused[:2] == (False, "InputError")
    assert not early
    x = torch.arange(3.0)
    for one, other in zip(gathered, [x + 1, -x, torch.tensor(6.0), x, 5], strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert torch.equal(added, x + 2)


def test_lookup_and_update_are_marked_however_they_are_reached() -> None:
    server = EmbeddingServer(make_model("sgd"), make_plan(), 0)
    for function in (EmbeddingServer.lookup, server.lookup, server.update):
        assert hasattr(function, "_wrapped_async_rpc_function")
    server.close()
    assert async_execution(lambda: None)._wrapped_async_rpc_function
