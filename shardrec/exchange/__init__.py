"""The exchange: ids out to the shards, pooled embeddings back; one all-to-all each way after a header."""
