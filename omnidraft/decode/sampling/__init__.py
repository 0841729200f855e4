"""Sampling: settings and their bounds, logits processors, grammars, seeded noise."""
