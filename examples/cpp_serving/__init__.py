"""Answers requests with a saved model in a C++ program without Python. See README.md."""
