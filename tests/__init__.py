"""The tests of shardrec, laid out like the package."""
