"""The lookup: fbgemm's table-batched kernels over this rank's shards, with fused optimizers."""
