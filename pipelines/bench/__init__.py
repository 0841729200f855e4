"""Decoding speed, side by side in one process: `python -m pipelines.bench`."""
