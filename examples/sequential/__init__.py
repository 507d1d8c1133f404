"""Models of item sequences, SASRec and HSTU, trained by ``shardrec train`` alone. See README.md."""
