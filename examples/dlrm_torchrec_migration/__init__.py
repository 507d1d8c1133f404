"""A DLRM trained with TorchRec, and what changes with shardrec."""
