"""The lookup: table-batched kernels over this rank's shards, with fused optimizers."""
