"""Hostile messages through the real consumer: `python -m pipelines.fuzz`."""
