"""A click model on the rows of the Criteo Kaggle challenge, from the raw files, by the command line. See README.md."""
