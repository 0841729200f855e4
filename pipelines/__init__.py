"""Runs that end: the demo, benchmarks, experiments, and tools to record, learn and evaluate."""
