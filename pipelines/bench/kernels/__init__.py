"""How long a pass takes, for every number format and engine: `python -m pipelines.bench.kernels`."""
