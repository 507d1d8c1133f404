"""Measurements of shardrec beside its peers. A folder each, with its figures and the command in README.md."""
