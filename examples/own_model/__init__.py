"""A model of your own under torchrun, in one script. See README.md."""
