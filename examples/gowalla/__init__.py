"""LightGCN on the Gowalla check-ins, its tables sharded over the ranks; see README.md."""
