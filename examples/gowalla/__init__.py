"""LightGCN on the Gowalla check-ins by ``shardrec train``; see README.md."""
