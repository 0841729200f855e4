"""What `python -m pipelines.soak` does, one part a file. Each part returns its figures and the promises it checked."""
