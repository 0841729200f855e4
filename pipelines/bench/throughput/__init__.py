"""Tokens a second under many clients, of servers side by side: `python -m pipelines.bench.throughput`."""
