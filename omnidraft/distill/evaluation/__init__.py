"""Held-out agreement, its speed-up, and comparisons between snapshots."""
