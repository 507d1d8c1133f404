"""Results, isolation and environment of ranks that run to their end."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.ranks import RankErrors, raises_on_all, run_without_shardrec
from tests.ranks import ranks as run_ranks

SCALE = 3.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A result class that only this module has."""

    rank: int
    value: Tensor


def _group_name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def _swap(x_W: Tensor) -> Tensor:
    """Functional all-to-all of one element for each rank; the group is resolved by its name."""
    ones = [1] * dist.get_world_size()
    pending = torch.ops._c10d_functional.all_to_all_single(x_W, ones, ones, _group_name())
    result: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return result


def _pid() -> int:
    return os.getpid()


# ---------------------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_results_come_in_order_of_rank(n: int) -> None:
    def where() -> tuple[int, int, str]:
        return dist.get_rank(), dist.get_world_size(), dist.get_backend()

    assert run_ranks(n, where) == [(rank, n, "gloo") for rank in range(n)]


def test_arguments_closures_and_classes_of_test_modules_travel() -> None:
    offset = torch.tensor([1.0, 2.0])

    def answer(x: Tensor, *, factor: float) -> Answer:
        return Answer(rank=dist.get_rank(), value=x * factor * SCALE + offset)

    results = run_ranks(2, answer, torch.ones(2), factor=2.0)
    assert [type(result) for result in results] == [Answer, Answer]
    assert [result.rank for result in results] == [0, 1]
    assert all(torch.equal(result.value, torch.tensor([7.0, 8.0])) for result in results)


def test_arguments_are_copies_for_each_rank() -> None:
    x = torch.zeros(2)

    def change(y: Tensor) -> Tensor:
        return y.add_(1 + dist.get_rank())

    assert [result.tolist() for result in run_ranks(2, change, x)] == [[1.0, 1.0], [2.0, 2.0]]
    assert x.tolist() == [0.0, 0.0]


def test_scripting_and_compiling_what_a_test_module_defines() -> None:
    def run() -> tuple[float, float]:
        @torch.compile(backend="eager", fullgraph=True)
        def compiled(x: Tensor) -> Tensor:
            return _scaled(x) + 1

        scripted = torch.jit.script(_Affine())
        return compiled(torch.ones(())).item(), scripted(torch.ones(())).item()

    assert run_ranks(2, run) == [(4.0, 3.0)] * 2


def _scaled(x: Tensor) -> Tensor:
    return x * SCALE


class _Affine(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 + 1.0


# -------------------------------------------------------------------------------------------------------- isolation


def test_fifty_groups_one_after_another_leave_nothing_behind() -> None:
    def cycle(k: int) -> tuple[list[float], str]:
        swapped = _swap(torch.arange(2.0) + 10 * dist.get_rank() + 100 * k)
        sub = dist.new_group([0, 1])
        dist.barrier(sub)
        return swapped.tolist(), _group_name()

    def resources() -> tuple[int, int, int]:
        for thread in threading.enumerate():
            if thread.name == "close-groups":
                thread.join()
        counts = []
        for _ in range(20):  # a thread that has been joined is seen for a little longer
            counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
            time.sleep(0.002)
        return os.getpid(), *min(counts)

    run_ranks(2, cycle, 0)
    before = run_ranks(2, resources)
    for k in range(50):
        (low, name), (high, _) = run_ranks(2, cycle, k)
        assert low == [100.0 * k, 100.0 * k + 10]
        assert high == [100.0 * k + 1, 100.0 * k + 11]
        assert name == "0"
    assert run_ranks(2, resources) == before


def test_processes_persist() -> None:
    assert run_ranks(2, _pid) == run_ranks(4, _pid)[:2]


def test_process_state_is_reset_before_a_call() -> None:
    def disturb() -> None:
        os.environ["SHARDREC_LEFT_OVER"] = "1"
        os.chdir("/")
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)

    def look() -> tuple[object, ...]:
        state = os.environ.get("SHARDREC_LEFT_OVER"), torch.get_num_threads(), torch.is_grad_enabled()
        return *state, os.getcwd(), torch.get_default_dtype()

    run_ranks(2, disturb)
    expected = (None, 1, True, os.getcwd(), torch.float32)
    assert run_ranks(2, look) == [expected] * 2


def test_ranks_start_with_the_seed_of_tests(seed: int) -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.random()), random.random()

    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    expected = torch.rand(()).item(), float(np.random.random()), random.random()
    assert run_ranks(2, draw) == run_ranks(2, draw) == [expected] * 2


def test_a_function_may_destroy_the_group_itself() -> None:
    assert run_ranks(2, dist.destroy_process_group) == [None, None]
    assert run_ranks(2, dist.get_rank) == [0, 1]


def test_a_rank_stays_until_its_peers_have_finished() -> None:
    def hand_over() -> float:
        value = torch.ones(1)
        if dist.get_rank() == 0:
            _later(0.2, lambda: dist.send(value, 1))
            return 0.0
        dist.recv(value, 0)
        return value.item()

    assert run_ranks(2, hand_over) == [0.0, 1.0]


def _later(seconds: float, action: Callable[[], object]) -> None:
    """Act in the background after the function has returned."""
    thread = threading.Timer(seconds, action)
    thread.daemon = True
    thread.start()


def test_ranks_that_finish_first_do_not_break_the_last_collective() -> None:
    def pass_the_barrier() -> int:
        dist.barrier()
        return dist.get_rank()

    for _ in range(20):
        assert run_ranks(4, pass_the_barrier) == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------------------------ environment


@pytest.mark.parametrize(
    ("n", "hosts", "expected"),
    [
        (1, 1, ["0/1 0/1 0/1"]),
        (2, 1, ["0/2 0/2 0/1", "1/2 1/2 0/1"]),
        (2, 2, ["0/2 0/1 0/2", "1/2 0/1 1/2"]),
        (4, 2, ["0/4 0/2 0/2", "1/4 1/2 0/2", "2/4 0/2 1/2", "3/4 1/2 1/2"]),
    ],
)
def test_environment_is_that_of_torchrun(n: int, hosts: int, expected: list[str]) -> None:
    def launched() -> str:
        def pair(rank: str, size: str) -> str:
            return f"{os.environ[rank]}/{os.environ[size]}"

        return " ".join(
            [pair("RANK", "WORLD_SIZE"), pair("LOCAL_RANK", "LOCAL_WORLD_SIZE"), pair("GROUP_RANK", "GROUP_WORLD_SIZE")]
        )

    assert run_ranks(n, launched, hosts=hosts) == expected


def test_rendezvous_by_environment_works_again_and_again() -> None:
    def rendezvous() -> str:
        store, rank, _ = next(dist.rendezvous("env://"))
        store.set(f"from {rank}", f"greetings of {rank}")
        return bytes(store.get(f"from {1 - rank}")).decode()

    for _ in range(2):
        assert run_ranks(2, rendezvous) == ["greetings of 1", "greetings of 0"]


def test_output_is_repeated_with_its_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print(f"one\ntwo of {dist.get_rank()}")
        os.write(2, b"three\n")

    run_ranks(2, speak)
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines[:3]) == ["[rank 0] one", "[rank 0] three", "[rank 0] two of 0"]
    assert sorted(lines[3:]) == ["[rank 1] one", "[rank 1] three", "[rank 1] two of 1"]
    run_ranks(2, dist.barrier)
    assert capsys.readouterr() == ("", "")


def test_warning_filters_of_the_test_hold_in_the_ranks() -> None:
    def warn() -> None:
        warnings.warn("ripe", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        raises_on_all(2, UserWarning, "ripe", warn)
        warnings.simplefilter("ignore", UserWarning)
        assert run_ranks(2, warn) == [None, None]


def test_programs_without_shardrec_have_torch_and_a_group() -> None:
    program = """
import sys
import torch.distributed as dist
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
assert "torch" in sys.modules
assert not {"shardrec", "torchrec"} & set(sys.modules)
raise LookupError(word)
"""
    with pytest.raises(RankErrors, match="rank 1: LookupError: told") as caught:
        run_without_shardrec(2, program, word="told")
    assert set(caught.value.errors) == {0, 1}
