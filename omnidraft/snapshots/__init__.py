"""Snapshots: check-summed folders with a manifest, a serving part and a resume part."""
