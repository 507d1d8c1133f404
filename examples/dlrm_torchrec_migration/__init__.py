"""A DLRM trained with TorchRec, and the same program on shardrec."""
