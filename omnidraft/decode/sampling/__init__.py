"""How a token is drawn: settings and their limits, logits processors, grammars, seeded noise."""
