"""A DLRM with deep cross layers in two stages, its sharded embeddings skipping past the bottom MLP."""
