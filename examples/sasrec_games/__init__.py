"""SASRec on Amazon Video Games, trained by ``shardrec train`` alone; see README.md."""
