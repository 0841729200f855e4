"""Runs that end: the demo, benchmarks, experiments, soaks, and tools to record, learn and evaluate."""
