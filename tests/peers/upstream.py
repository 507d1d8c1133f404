"""TorchRec's own tests, imported from a checkout beside the installed TorchRec, with shardrec in place of its names.

Nothing of the checkout is copied or changed.
"""

from __future__ import annotations

import logging
import unittest
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torchrec.distributed
import torchrec.distributed.train_pipeline
import torchrec.optim
import torchrec.test_utils
from torchrec.distributed import model_parallel
from torchrec.distributed.train_pipeline import train_pipelines

from tests.peers.counterparts import put_into, put_into_models
from tests.peers.examples import stand_in

__all__ = ["SUITES", "classes_of", "prepare"]

_OPTIM = "torchrec.optim.tests"
_TESTS, _UTILS, _PIPELINES = (
    f"torchrec.distributed.{folder}" for folder in ("tests", "test_utils", "train_pipeline.tests")
)

SUITES: dict[str, dict[str, tuple[str, ...]]] = {
    "sharding": {
        f"{_TESTS}.test_model_parallel_nccl": ("ModelParallelTestNccl",),
        f"{_TESTS}.test_model_parallel_hierarchical": ("ModelParallelHierarchicalTest",),
        f"{_TESTS}.test_sequence_model_parallel": ("SequenceModelParallelTest", "TDSequenceModelParallelTest"),
        f"{_TESTS}.test_sequence_model_parallel_hierarchical": ("SequenceModelParallelHierarchicalTest",),
        f"{_TESTS}.test_2d_sharding": ("TestEmbeddingBagCollection2DParallel", "TestEmbeddingCollection2DParallel"),
        f"{_TESTS}.test_dynamic_sharding": ("MultiRankDMPDynamicShardingTest",),
    },
    "pipelines": {
        f"{_PIPELINES}.test_train_pipelines": (
            "TrainPipelineBaseTest",
            "TrainPipelineSparseDistTest",
            "TrainPipelineAttachDetachTest",
            "TrainPipelineSparseDistLiteTest",
            "PrefetchTrainPipelineSparseDistTest",
            "EvalPipelineSparseDistTest",
        ),
        f"{_PIPELINES}.test_postproc": ("TrainPipelinePostprocTest",),
        f"{_PIPELINES}.test_train_pipeline_prefetch_sparse_dist": ("PrefetchTrainPipelineTest",),
    },
    "state_dict": {
        f"{_TESTS}.test_model_parallel_gloo": ("ModelParallelStateDictTestGloo", "ModelParallelSparseOnlyTestGloo"),
        f"{_TESTS}.test_sequence_model_parallel_single_rank": ("SequenceModelParallelStateDictTest",),
        f"{_TESTS}.test_fp_embeddingbag_single_rank": ("FPModelParallelStateDictTest",),
        f"{_TESTS}.test_init_parameters": ("ParameterInitializationTest",),
    },
    "optimizers": {
        f"{_TESTS}.test_apply_optim_per_param": (
            "ShardedEmbeddingBagCollectionApplyOptimPerParamTest",
            "ShardedEmbeddingCollectionApplyOptimPerParamTest",
        ),
    },
    "wrappers": {
        f"{_OPTIM}.test_clipping": (
            "TestGradientClippingOptimizer",
            "TestClipGradNorm",
            "TestGetGrads",
            "TestBatchCalNorm",
            "TestComputeTotalNorm",
        ),
        f"{_OPTIM}.test_keyed": ("TestKeyedOptimizer", "TestCombinedOptimizer", "TestOptimizerWrapper"),
        f"{_OPTIM}.test_optim": ("TestInBackwardOptimizerFilter",),
        f"{_OPTIM}.test_rowwise_adagrad": ("RowWiseAdagradTest",),
        f"{_OPTIM}.test_semi_sync": ("TestSemisyncOptimizer", "TestSemisyncOptimizerEdgeCases"),
        f"{_OPTIM}.test_warmup": ("TestWarmupOptimizer",),
    },
}
"""By suite and module, the classes of tests."""

_PATCHED = (f"{_UTILS}.test_sharding", f"{_UTILS}.test_model_parallel_base", f"{_PIPELINES}.test_train_pipelines_base")


@contextmanager
def _as_with_gpus() -> Iterator[None]:
    """Tests that ask for GPUs when they are imported are not skipped; they run on the CPU."""
    count: Callable[[], int] = lambda: 8  # noqa: E731  # for each of two names
    with (
        mock.patch.object(torch.cuda, "is_available", lambda: True),
        mock.patch.object(torch.cuda, "device_count", count),
        mock.patch.object(torchrec.test_utils, "cuda_device_count", count, create=True),
        mock.patch.object(torchrec.test_utils, "skip_if_asan_class", lambda cls: cls),
    ):
        yield


def _on_the_cpu(cls: Any) -> None:
    """The tests of a class have its ``device`` on the CPU, and its process group, if it has one, over gloo."""
    set_up = cls.setUp
    over_gloo = {"backend": "gloo"} if "single_rank" in cls.__module__ else {}

    def on_the_cpu(self: Any) -> None:
        with suppress(unittest.SkipTest):  # after all is set up: NCCL is not there, and not used
            set_up(self, **over_gloo)
        if hasattr(self, "device"):
            self.device = torch.device("cpu")

    cls.setUp = on_the_cpu


def prepare(checkout: Path) -> None:
    """Make TorchRec's tests importable in this process.

    Args:
        checkout: of TorchRec's repository, at the release that is installed.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    stand_in()
    put_into_models()
    distributed = checkout / "torchrec" / "distributed"
    torchrec.distributed.__path__.append(str(distributed))
    torchrec.distributed.train_pipeline.__path__.append(str(distributed / "train_pipeline"))
    torchrec.optim.__path__.append(str(checkout / "torchrec" / "optim"))
    for module in (torchrec.distributed, model_parallel, torchrec.distributed.train_pipeline, train_pipelines):
        put_into(module)  # for what the tests take from it when they are imported
    with _as_with_gpus():
        modules = [import_module(name) for name in (*_PATCHED, *(name for suite in SUITES.values() for name in suite))]
    for module in modules:
        put_into(module)


def classes_of(suite: str) -> Iterator[type[unittest.TestCase]]:
    """The classes of a suite."""
    for name, classes in SUITES[suite].items():
        module: ModuleType = import_module(name)
        for each in classes:
            cls = getattr(module, each)
            _on_the_cpu(cls)
            yield cls
