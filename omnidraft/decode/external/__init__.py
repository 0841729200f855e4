"""Drafting for an engine that is not ours and batches: chains for all its texts at once, which it tells by ids only."""
