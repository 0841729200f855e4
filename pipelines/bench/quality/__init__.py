"""What number formats cost in quality: `python -m pipelines.bench.quality`."""
