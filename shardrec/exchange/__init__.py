"""The exchange: ids are sent to the shards and embeddings back, by one all-to-all each way after a header."""
