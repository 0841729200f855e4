"""The parts of `python -m pipelines.soak`, a module each. A part returns its figures and the assertions on them."""
