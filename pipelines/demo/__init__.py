"""The whole circle on real models, which omnidraft/demo runs: `python -m pipelines.demo`."""
