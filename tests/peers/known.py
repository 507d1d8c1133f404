"""Where TorchRec's own tests differ on shardrec, and why: patterns of the names that :mod:`tests.peers.main` prints.

docs/ledger.md has the reasons at more length.
"""

from __future__ import annotations

__all__ = ["DIFFERENCES", "LEFT_OUT"]

LEFT_OUT = {
    "^(sharding|state_dict) .*(uvm|UVM)|test_sharding_multiple_kernels": "kernels of unified memory, which need a GPU",
    "(use_inter_host_allreduce|custom_all_reduce)=True": "options of the all-reduce between replicas: it has none",
    "fsdp_pre_trace": "FSDP1 needs a GPU",
    "execute_all_batches=False|test_execute_all_batches_false": "batches left in the pipeline when its iterator ends",
}
"""Examples that are not run."""

DIFFERENCES = {
    "TDSequenceModelParallelTest": "a TensorDict as features is refused: give a KeyedJaggedTensor",
    "test_feature_processed_ebc": "ids travel with their weights; those of a trained processor in their own step",
    "test_model_detach_.*with_postproc=True": "features whose keys come twice are refused",
    "test_model_detach_during_train|test_detach_restores_nested_postproc": "it looks for TorchRec's rewritten forwards",
    "inputs_modify_kjt_recursive": "features put back into the batch look like its own until the second step",
    "postproc_with_collection_args": "modules that only change the batch are not needed for the features",
    "PostprocTest::.*(fwd_values_cached|arg_transform|postproc_recursive)": "it looks at private attributes",
    "PrefetchTrainPipelineTest::.*(queue|context|fill|stream|dequeues)": "it looks at private queues",
    "test_meta_device_dmp_state_dict": "tables on meta after sharding: shardrec.plan tells their sizes",
    "test_parameter_init": "a model without a collection is refused: DistributedDataParallel is for it",
    "torch_state_error_includes|validate_input_only_once": "it looks at private methods and logs of TorchRec's module",
    "input_validation_enabled": "the same error in other words",
    "fused_ebc_as_top_level": "FusedEmbeddingBagCollection: apply_optimizer_in_backward takes its place",
    "per_parameter_optimizer": "set_gradient_division(False): gradients are means over the ranks",
}
"""Examples that run and fail."""
