"""Drafting for another engine's batches: chains for all its sequences at once, of which it passes token ids only."""
