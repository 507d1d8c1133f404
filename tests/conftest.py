"""What every test has: seeds, quiet third-party packages, ranks, and the data folder."""

from __future__ import annotations

import collections
import gc
import multiprocessing.util
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.worker import SEED, quiet_environment, seed_torch

# Before torch is imported (tests.ranks does so): it reads them once. What the user has set goes first.
for _name, _value in quiet_environment().items():
    os.environ.setdefault(_name, _value)

# Every run draws other examples. --hypothesis-profile=thorough draws many: after a change to what they search.
for _profile, _examples in {"shardrec": 10, "thorough": 1000}.items():
    hypothesis.settings.register_profile(
        _profile,
        max_examples=_examples,
        deadline=None,
        database=None,
        derandomize=bool(os.environ.get("CI")),
        print_blob=True,
    )
hypothesis.settings.load_profile("shardrec")

_THIRD_PARTY = (
    "fbgemm_gpu",
    "google",
    "matplotlib",
    "numpy",
    "pyre_extensions",
    "tensorboard",
    "tensordict",
    "torch",
    "torchmetrics",
    "torchrec",
    "tqdm",
)


def pytest_configure(config: pytest.Config) -> None:
    """Silence warnings that third-party modules cause, and no others.

    pytest sets the filters anew for each phase of a test, so that a fixture could not set them.
    """
    for package in _THIRD_PARTY:
        config.addinivalue_line("filterwarnings", rf"ignore:::{package}(\.|$)")
    # The compilers' caches, and what torch leaves behind, go to a folder that goes with this process; not tmp_path,
    # which pytest keeps for a look at what failed.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    multiprocessing.util.get_temp_dir()  # multiprocessing's, which it removes itself, later than this one
    # A worker's is in that of pytest's first process: a short name, for the path of a socket has few letters.
    prefix = "" if "PYTEST_XDIST_WORKER" in os.environ else "shardrec-tests-"
    scratch = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    config.add_cleanup(scratch.cleanup)
    os.environ["TMPDIR"] = tempfile.tempdir = scratch.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without collections of garbage, a sixth of the time, for what has been imported stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of the parameters of a test marked ``some(n)``, n are drawn; the others are slow.

    Tests of a module whose marks have the same ``of`` are drawn from together.
    """
    drawn = collections.defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("some")
        if mark is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            group = f"{test.partition('::')[0]} {mark.kwargs['of']}" if "of" in mark.kwargs else test
            drawn[group, mark.args[0]].append(item)
    # The same in all processes of a run; another in the next, as of examples.
    run = "" if os.environ.get("CI") else os.environ.get("PYTEST_XDIST_TESTRUNUID", str(time.time()))
    for (group, count), variants in drawn.items():
        for item in random.Random(f"{run} {group}").sample(variants, max(0, len(variants) - count)):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """A full collection need not look at half a million objects again, and tests leave little: collect now and then."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Start the process that ranks are forked from: itself a fork, after first uses of a model."""
    if session.config.option.collectonly or not any(map(_uses_ranks, session.items)):
        return
    import torch

    from tests.ranks import POOL

    if torch.cuda.is_available():  # its state would not survive the fork
        POOL.prepare()
        return
    from tests.executors import EXECUTORS
    from tests.first_uses import use

    # A program's first use takes a second, which many tests save: also in this process.
    use(EXECUTORS if len(session.items) > 1000 else ["eager"])
    POOL.fork()


def _uses_ranks(item: pytest.Item) -> bool:
    names = {*vars(getattr(item, "module", object)), *getattr(item, "fixturenames", ())}
    return not names.isdisjoint({"ranks", "raises_on_all"})


def pytest_unconfigure() -> None:
    """End the rank processes."""
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].POOL.close()
        sys.modules["tests.ranks"].BARE.close()


@pytest.fixture(autouse=True)
def seed() -> int:
    """The seed that random, and torch and numpy if they are imported, have at the start of each test."""
    random.seed(SEED)
    # Importing torch takes more than a second, and tests of pure functions do without it.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        seed_torch(SEED)
    return SEED


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """`tests.ranks.ranks`: ``ranks(n, fn, *args, timeout=120.0, hosts=1, expect_death=(), **kwargs)``."""
    from tests.ranks import ranks as run_ranks

    yield run_ranks


@pytest.fixture(scope="module")
def one_core() -> Iterator[None]:
    """One core is all that this process sees: a run has a thread for each, and threads that wait spin."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: {0})
        yield


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of data sets: ``SHARDREC_DATA``, or ``shared/data`` beside the checkout."""
    return find_data()


def find_data() -> Path:
    """The folder of data sets, or a skipped test that says what to set."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SHARDREC_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no data sets in {folder}: set SHARDREC_DATA to the folder that has them")
    return folder
