"""Where TorchRec's own tests differ on shardrec, and why: patterns of the names that :mod:`tests.peers.main` prints.

README.md has what they come to. docs/ledger.md has the reasons at more length.
"""

from __future__ import annotations

__all__ = ["DIFFERENCES", "LEFT_OUT"]

LEFT_OUT = {
    "^(sharding|state_dict) .*(uvm|UVM)|test_sharding_multiple_kernels": "kernels of unified memory, which need a GPU",
    "(use_inter_host_allreduce|custom_all_reduce)=True": "options of the all-reduce between replicas: it has none",
    "fsdp_pre_trace": "FSDP1 needs a GPU",
    "execute_all_batches=False|test_execute_all_batches_false": "batches left in the pipeline when its iterator ends",
    "^wrappers Test(GetGrads|BatchCalNorm|ComputeTotalNorm)::": "it tests private functions of TorchRec's clipping",
    "^wrappers TestSemisyncOptimizer": "SemisyncOptimizer is another algorithm than the unsharded one",
}
"""Examples that are not run."""

DIFFERENCES = {
    "TDSequenceModelParallelTest": ("a TensorDict as features is refused: give a KeyedJaggedTensor", "TensorDict"),
    "test_feature_processed_ebc": (
        "ids travel with their weights; those of a trained processor in their own step",
        "^AssertionError: 0 != 1",
    ),
    "test_model_detach_.*with_postproc=True": ("features whose keys come twice are refused", "come more than once"),
    "postproc_with_collection_args": (
        "the same outputs; modules that only change the batch in place are not run ahead",
        "^AssertionError: 2 != 4",
    ),
    "PostprocTest::.*fwd_values_cached": ("it reads the cache of a batch in progress", "no attribute 'contexts'"),
    "PostprocTest::.*(arg_transform|postproc_recursive)": (
        "the same outputs; then it reads the traced arguments",
        "no attribute '_args'",
    ),
    "PrefetchTrainPipelineTest::.*(queue|context|fill|stream|dequeues)": (
        "it looks at private queues",
        "object has no attribute '_?(batches|contexts|prefetch_stream|fill_pipeline)",
    ),
    "test_meta_device_dmp_state_dict": (
        "tables on meta after sharding: shardrec.plan tells their sizes",
        "device is 'meta'",
    ),
    "test_parameter_init": (
        "a model without a collection is refused: DistributedDataParallel is for it",
        "holds no torchrec embedding collection",
    ),
    "torch_state_error_includes": ("it looks at private methods of TorchRec's module", "'_initialize_torch_state'"),
    "validate_input_only_once": ("it looks at the logs of TorchRec's module", "no logs of level INFO"),
    "input_validation_enabled": ("the same error in other words", "come more than once"),
    "fused_ebc_as_top_level": (
        "FusedEmbeddingBagCollection: apply_optimizer_in_backward takes its place",
        "holds no torchrec embedding collection",
    ),
    "per_parameter_optimizer": (
        "set_gradient_division(False): gradients are means over the ranks",
        "Tensor-likes are not close",
    ),
    "test_clip_no_gradients_norm_meta_device": (
        "a dense part on meta is drawn by shard, and a bare parameter has no reset_parameters()",
        "'dense.0' is on meta",
    ),
}
"""Examples that run and fail: why, and a pattern of the error. With another error they are failures."""
