"""A model that is trained on clicks as they arrive, and served while it learns. See README.md."""
