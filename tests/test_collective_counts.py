"""CountCollectives sees every collective once, whoever asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers the autograd kernels
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from tests.collective_counts import CollectiveOperators, CountCollectives
from tests.ranks import ranks

functional = torch.ops._c10d_functional


def _group_name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def _count(fn: Callable[[], object]) -> dict[str, int]:
    with CountCollectives() as counts:
        fn()
    return dict(counts)


def _exchange(x_N: Tensor) -> Tensor:
    """Even all-to-all with a gradient."""
    split = [x_N.numel() // dist.get_world_size()] * dist.get_world_size()
    autograd = torch.ops._c10d_functional_autograd.all_to_all_single
    result: Tensor = functional.wait_tensor(autograd(x_N, split, split, _group_name()))
    return result


def _train_step() -> Tensor:
    x_N = torch.ones(4, requires_grad=True)
    (_exchange(x_N * 3) * (1 + dist.get_rank())).sum().backward()
    assert x_N.grad is not None
    return x_N.grad


class _Exchange(torch.autograd.Function):
    """An exchange whose backward is written by hand, as shardrec's are."""

    @staticmethod
    def forward(ctx: object, x_N: Tensor) -> Tensor:
        result: Tensor = functional.wait_tensor(functional.all_to_all_single(x_N, [2, 2], [2, 2], _group_name()))
        return result

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return _Exchange.forward(ctx, grads[0].contiguous())


def test_functional_collectives_forward_and_backward() -> None:
    def step() -> tuple[dict[str, int], list[float]]:
        grads: list[Tensor] = []
        counts = _count(lambda: grads.append(_train_step()))
        return counts, grads[0].tolist()

    assert ranks(2, step) == [({"all_to_all": 2}, [3.0, 3.0, 6.0, 6.0])] * 2


def test_backward_of_an_autograd_function() -> None:
    def step() -> dict[str, int]:
        x_N = torch.ones(4, requires_grad=True)
        y_N = _Exchange.apply(x_N)  # type: ignore[no-untyped-call]
        return _count(lambda: y_N.sum().backward())

    assert ranks(2, step) == [{"all_to_all": 1}] * 2


def test_other_threads() -> None:
    def step() -> dict[str, int]:
        thread = threading.Thread(target=_train_step)

        def run() -> None:
            thread.start()
            thread.join()

        return _count(run)

    assert ranks(2, step) == [{"all_to_all": 2}] * 2


def test_scripted_collectives() -> None:
    def step() -> dict[str, int]:
        @torch.jit.script
        def exchange(x_N: Tensor, group: str) -> Tensor:
            out_N = torch.ops._c10d_functional.all_to_all_single(x_N, [2, 2], [2, 2], group)
            result: Tensor = torch.ops._c10d_functional.wait_tensor(out_N)
            return result

        return _count(lambda: exchange(torch.ones(4), _group_name()))

    assert ranks(2, step) == [{"all_to_all": 1}] * 2


def test_compiled_collectives_stay_compiled() -> None:
    def step() -> tuple[dict[str, int], int]:
        graphs: list[object] = []

        def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
            graphs.append(graph)
            return graph.forward

        group = _group_name()

        @torch.compile(backend=backend, fullgraph=True)
        def exchange(x_N: Tensor) -> Tensor:
            out_N: Tensor = functional.wait_tensor(functional.all_to_all_single(x_N, [2, 2], [2, 2], group))
            return out_N

        return _count(lambda: exchange(torch.ones(4))), len(graphs)

    assert ranks(2, step) == [({"all_to_all": 1}, 1)] * 2


def test_ddp_reducer() -> None:
    def step() -> dict[str, int]:
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        return _count(loss.backward)

    assert ranks(2, step) == [{"all_reduce": 1}] * 2


def _plain_calls() -> dict[str, Callable[[], object]]:
    n = dist.get_world_size()
    rank = dist.get_rank()
    x_N = torch.ones(2 * n)
    parts = list(torch.ones(n, 2))
    at_root = parts if rank == 0 else None
    return {
        "all_reduce": lambda: dist.all_reduce(x_N.clone()),
        "all_gather": lambda: dist.all_gather(parts, torch.ones(2)),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(2), parts),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(2 * n), x_N),
        "broadcast": lambda: dist.broadcast(x_N.clone(), 0),
        "reduce": lambda: dist.reduce(x_N.clone(), 0),
        "gather": lambda: dist.gather(torch.ones(2), at_root),
        "scatter": lambda: dist.scatter(torch.empty(2), at_root),
        "barrier": dist.barrier,
    }


def test_plain_calls_count_once_each() -> None:
    def step() -> dict[str, dict[str, int]]:
        return {name: _count(call) for name, call in _plain_calls().items()}

    for seen in ranks(2, step):
        assert seen == {name: {name: 1} for name in seen}
        assert len(seen) == 9


def test_functional_names_agree_with_plain_ones() -> None:
    def step() -> dict[str, int]:
        x_N, group, n = torch.ones(4), _group_name(), dist.get_world_size()

        def run() -> None:
            functional.wait_tensor(functional.all_reduce(x_N, "sum", group))
            functional.wait_tensor(functional.all_gather_into_tensor(x_N, n, group))
            functional.wait_tensor(functional.reduce_scatter_tensor(x_N, "sum", n, group))
            functional.wait_tensor(functional.broadcast(x_N, 0, group))

        return _count(run)

    assert ranks(2, step) == [{"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1}] * 2


def test_send_and_recv() -> None:
    def step() -> dict[str, int]:
        x_N = torch.ones(3)
        return _count(lambda: dist.send(x_N, 1) if dist.get_rank() == 0 else dist.recv(x_N, 0))

    assert ranks(2, step) == [{"send": 1}, {"recv": 1}]


def test_asynchronous_collective_counts_though_it_ends_later() -> None:
    def step() -> dict[str, int]:
        work: list[dist.Work] = []

        def start() -> None:
            pending = dist.all_reduce(torch.ones(2), async_op=True)
            assert pending is not None
            work.append(pending)

        if dist.get_rank() == 1:
            counts = _count(start)
            dist.send(torch.ones(1), 0)
        else:  # starts when rank 1 has already counted
            dist.recv(torch.ones(1), 1)
            counts = _count(start)
        work[0].wait()
        return counts

    assert ranks(2, step) == [{"all_reduce": 1}] * 2


def test_nothing_is_counted_outside_and_without() -> None:
    def step() -> tuple[dict[str, int], dict[str, int]]:
        dist.barrier()
        with CountCollectives() as counts:
            torch.ones(3).sum()
        dist.barrier()
        return dict(counts), _count(dist.barrier)

    assert ranks(2, step) == [({}, {"barrier": 1})] * 2


def test_a_counter_that_is_used_again_starts_at_zero() -> None:
    def step() -> dict[str, int]:
        counts = CountCollectives()
        for _ in range(3):
            with counts:
                dist.barrier()
        return dict(counts)

    assert ranks(1, step) == [{"barrier": 1}]


def test_errors_pass_through_and_the_counts_stay() -> None:
    def step() -> dict[str, int]:
        counts = CountCollectives()
        with pytest.raises(ZeroDivisionError), counts:
            dist.barrier()
            _ = 1 / 0
        return dict(counts)

    assert ranks(1, step) == [{"barrier": 1}]


def test_ranges_are_not_recorded() -> None:
    """What gloo's threads end after the block would be written into freed memory."""
    with CollectiveOperators() as called, torch.profiler.record_function("c10d::range"):
        torch.ones(3).sum()
    assert called == {}


def test_all_to_alls_of_the_operators() -> None:
    def step() -> tuple[dict[str, int], dict[str, int]]:
        with CollectiveOperators() as called:
            dist.barrier()
            _train_step()
        return dict(called), called.all_to_alls()

    exchanges = {"c10d::alltoall_base_": 2}
    assert ranks(2, step) == [({"c10d::barrier": 1, **exchanges}, exchanges)] * 2


def test_nested_blocks_are_refused() -> None:
    with CountCollectives(), pytest.raises(RuntimeError, match="already running"), CountCollectives():
        pass
    with CountCollectives() as counts:
        pass
    assert counts == {}
