"""The whole circle on real models: `python -m pipelines.demo`."""
