"""Measurements of shardrec beside its peers; a folder each, with its figures and the command in README.md."""
