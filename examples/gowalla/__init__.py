"""LightGCN on the Gowalla check-ins by ``shardrec train``. See README.md."""
