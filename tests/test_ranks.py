"""The ranks of tests: what would let a wrong test pass or fail a right one, and what is left when ranks die or hang."""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parcel import pack
from tests.rank_pool import MAX_RANKS, Pool
from tests.ranks import RankDied, RankErrors, RankHung, UnpicklableError, raises_on_all, ranks, run_without_shardrec


class FaultError(ValueError):
    """An exception class that only this module has."""


class AwkwardError(Exception):
    """Cannot be unpickled: `args` does not fit `__init__`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A result class that only this module has."""

    rank: int
    value: Tensor


def _pid() -> int:
    return os.getpid()


# ------------------------------------------------------------------------------------------- arguments, state, results


def test_functions_arguments_and_results_travel() -> None:
    offset, given, add = torch.tensor([1.0, 2.0]), torch.ones(2), torch.ops.aten.add

    def answer(x: Tensor, *, factor: float) -> Answer:
        x.add_(dist.get_rank())
        return Answer(rank=dist.get_rank(), value=add(x * factor, offset))

    results = ranks(2, answer, given, factor=2.0)
    assert [(type(result), result.rank, result.value.tolist()) for result in results] == [
        (Answer, 0, [3.0, 4.0]),
        (Answer, 1, [5.0, 6.0]),
    ]
    assert given.tolist() == [1.0, 1.0], "each rank has a copy"
    for value in (torch.ops, torch.ops.aten.add, torch.ops.aten.add.Tensor, torch.ops.higher_order, torch.classes):
        assert pickle.loads(pack(value)) is value


def test_the_state_of_a_process_is_reset_before_a_call() -> None:
    def disturb() -> int:
        os.environ["SHARDREC_LEFT_OVER"] = "1"
        os.chdir("/")
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.float64)
        return os.getpid()

    def look() -> tuple[object, ...]:
        state = os.environ.get("SHARDREC_LEFT_OVER"), torch.get_num_threads(), torch.is_grad_enabled()
        drawn = torch.rand(()).item(), float(np.random.random()), random.random()
        return *state, os.getcwd(), torch.get_default_dtype(), *drawn

    pids = ranks(2, disturb)
    seen = ranks(2, look)
    assert seen[0] == seen[1]
    assert seen[0][:5] == (None, 1, True, os.getcwd(), torch.float32)
    assert seen[0][5:] == (torch.rand(()).item(), float(np.random.random()), random.random()), "a test's own seed"
    assert ranks(4, _pid)[:2] == pids, "the processes are the same"


def test_a_rank_makes_torchrecs_first_collective_with_one_that_has_made_it() -> None:
    """After the death of a rank, whose replacement would wait for it alone until the call's time limit."""

    def make() -> None:
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.distributed.types import ShardingPlan

        plan = ShardingPlan(plan={})
        DistributedModelParallel(nn.Linear(1, 1), device=torch.device("cpu"), plan=plan, init_data_parallel=False)

    ranks(1, make)
    ranks(2, make, timeout=20)


def test_the_environment_is_that_of_torchrun() -> None:
    def launched() -> str:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
        next(dist.rendezvous("env://"))
        return " ".join(os.environ[name] for name in names)

    for _ in range(2):
        assert ranks(4, launched, hosts=2) == ["0 4 0 2 0 2", "1 4 1 2 0 2", "2 4 0 2 1 2", "3 4 1 2 1 2"]


def test_groups_one_after_another_leave_nothing_behind() -> None:
    def cycle(k: int) -> list[float]:
        value = torch.ones(1) * k + dist.get_rank()
        dist.all_reduce(value)
        dist.barrier(dist.new_group([0, 1]))
        return value.tolist()

    def resources() -> tuple[int, int, int]:
        for thread in threading.enumerate():
            if thread.name == "close-groups":
                thread.join()
        counts = []
        for _ in range(20):  # a thread that has been joined is seen for a little longer
            counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
            time.sleep(0.002)
        return os.getpid(), *min(counts)

    ranks(2, cycle, 0)
    before = ranks(2, resources)
    for k in range(15):
        assert ranks(2, cycle, k) == [[2.0 * k + 1]] * 2
    assert ranks(2, resources) == before


def test_what_ranks_write_and_warn_of(capsys: pytest.CaptureFixture[str]) -> None:
    def speak() -> None:
        print(f"one\ntwo of {dist.get_rank()}")
        os.write(2, b"three\n")
        warnings.warn("ripe", UserWarning, stacklevel=1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        ranks(2, speak)
        lines = capsys.readouterr().out.splitlines()
        assert sorted(lines[:3]) == ["[rank 0] one", "[rank 0] three", "[rank 0] two of 0"]
        assert sorted(lines[3:]) == ["[rank 1] one", "[rank 1] three", "[rank 1] two of 1"]
        warnings.simplefilter("error", UserWarning)
        raises_on_all(2, UserWarning, "ripe", speak)


@pytest.mark.parametrize(
    ("module", "heard"), [("torch.jit._script", 0), ("torchrec", 0), ("shardrec.lookup", 1), ("torchy", 1)]
)
def test_only_warnings_of_third_parties_are_silenced(module: str, heard: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.warn_explicit("old", FutureWarning, "file.py", 1, module=module, registry={})
    assert len(seen) == heard


@pytest.mark.slow
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


# ------------------------------------------------------------------------------------------------ errors, death, hangs


def test_a_rank_that_fails_is_told_in_full_and_frees_its_peers() -> None:
    def fail() -> str:
        if dist.get_rank() == 1:
            print("about to fail")
            dist.all_reduce(torch.ones(1), async_op=True)
            raise FaultError("row 7 is broken")
        if dist.get_rank() == 0:
            dist.barrier()
        return "fine"

    with pytest.raises(RankErrors, match=r"2 of 3 ranks failed:\n(.*\n)*rank 1: FaultError: row 7 is broken") as caught:
        ranks(3, fail, grace=60.0)
    failed = caught.value
    assert isinstance(failed.errors[0], RuntimeError)
    assert not isinstance(failed.errors[0], RankHung)
    assert type(failed.errors[1]) is FaultError
    assert 'raise FaultError("row 7 is broken")' in failed.tracebacks[1]
    assert (failed.results, failed.outputs[1]) == ({2: "fine"}, "about to fail\n")


def test_ranks_that_fail_together_all_say_why() -> None:
    def fail() -> None:
        fault = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(fault)
        raise FaultError(f"fault code {fault.item():.0f}")

    for _ in range(3):
        assert raises_on_all(4, FaultError, "fault code 6", fail) == ["fault code 6"] * 4


def test_raises_on_all_refuses_other_outcomes() -> None:
    def fail(on: tuple[int, ...], message: str) -> int:
        if dist.get_rank() in on:
            raise FaultError(message)
        return dist.get_rank()

    assert raises_on_all(2, ValueError, "^x$", fail, (0, 1), "x") == ["x", "x"]
    for kind, words, on, seen in (
        (FaultError, "x", (), r"They returned \[0, 1\]"),
        (FaultError, "x", (1,), r"not so on \[0\]"),
        (FaultError, "y", (0, 1), r"not so on \[0, 1\]"),
        (KeyError, "x", (0, 1), r"not so on \[0, 1\]"),
    ):
        with pytest.raises(AssertionError, match=seen):
            raises_on_all(2, kind, words, fail, on, "x")


def test_what_cannot_be_pickled_and_what_exits_is_an_error_of_its_rank() -> None:
    def raise_(error: type[Exception]) -> None:
        raise AwkwardError(1, 2) if error is AwkwardError else error("has a lock", threading.Lock())

    raises_on_all(2, UnpicklableError, "AwkwardError: 1 and 2", raise_, AwkwardError)
    raises_on_all(2, UnpicklableError, "ValueError: .*has a lock", raise_, ValueError)
    raises_on_all(2, TypeError, "pickle", threading.Lock)
    raises_on_all(2, SystemExit, "4", sys.exit, 4)


def _die(rank: int, number: int) -> int:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), number)
    return dist.get_rank()


def test_ranks_that_all_raised_stay_and_what_is_under_way_does_no_harm() -> None:
    def fail(peer: int | None) -> None:
        if peer is not None and dist.get_rank() != peer:
            dist.irecv(torch.empty(1), peer)  # nobody sends
        raise FaultError("x")

    pids = ranks(2, _pid)
    raises_on_all(2, FaultError, "x", fail, None)
    assert ranks(2, _pid) == pids
    raises_on_all(2, FaultError, "x", fail, 1)
    assert ranks(2, dist.get_rank) == [0, 1]


def test_a_death_is_reported_and_the_rank_replaced() -> None:
    before = ranks(2, _pid)
    with pytest.raises(RankErrors, match=r"signal 11") as caught:
        ranks(2, _die, 1, signal.SIGSEGV)
    error = caught.value.errors[1]
    assert isinstance(error, RankDied)
    assert error.code == -signal.SIGSEGV
    assert "in _die" in caught.value.tracebacks[1]
    assert caught.value.results == {0: 0}
    after = ranks(2, _pid)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_a_death_that_is_expected_has_to_come() -> None:
    alive, dead = ranks(2, _die, 1, signal.SIGKILL, expect_death={1})
    assert (alive, isinstance(dead, RankDied)) == (0, True)
    with pytest.raises(RankErrors, match=r"rank 0: AssertionError: was expected to die, but returned 0"):
        ranks(2, _die, 1, signal.SIGKILL, expect_death={0, 1})
    with pytest.raises(RankErrors, match="rank 1: RankDied"):
        ranks(2, _die, 1, signal.SIGKILL, expect_death={0})


def test_a_hang_is_reported_with_every_stack_and_the_ranks_are_replaced() -> None:
    def mismatched() -> None:
        dist.barrier() if dist.get_rank() == 0 else dist.recv(torch.ones(1), 0)

    before = ranks(2, _pid)
    with pytest.raises(RankErrors) as caught:
        ranks(2, mismatched, timeout=0.5)
    stacks = [error.stack for error in caught.value.errors.values() if isinstance(error, RankHung)]
    assert "in barrier" in stacks[0]
    assert "in recv" in stacks[1]
    assert not set(before) & set(ranks(2, _pid))


def test_grace_ends_the_wait_after_a_failure() -> None:
    def fail() -> None:
        if dist.get_rank() == 0:
            raise FaultError("first")
        time.sleep(1000)

    with pytest.raises(RankErrors) as caught:
        ranks(2, fail, grace=0.2, timeout=1000.0)
    assert isinstance(caught.value.errors[0], FaultError)
    assert isinstance(caught.value.errors[1], RankHung)


def test_a_pool_leaves_no_process() -> None:
    pool = Pool([])
    pids = [worker.pid for worker in pool._workers_for(3)]
    server = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    child = os.fork()
    if child == 0:  # a copy of the session, which leaves the ranks alone
        pool.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert pids == pool.pids() == [worker.pid for worker in pool._workers_for(3)]
    pool.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in [server, *pids])
    pids = [worker.pid for worker in pool._workers_for(2)]  # anew
    # A shell without job control starts what runs in the background with interrupts ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, pack((time.sleep, (60,), {}, [])), hosts=1, timeout=60, grace=60, mortal=frozenset())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_impossible_worlds_are_refused() -> None:
    for n, hosts, dying, remedy in (
        (MAX_RANKS + 1, 1, (), "take 1 to 4"),
        (4, 3, (), "take a divisor of 4"),
        (2, 1, {2}, "the ranks are 0 to 1"),
    ):
        with pytest.raises(ValueError, match=remedy):
            ranks(n, _pid, hosts=hosts, expect_death=dying)
