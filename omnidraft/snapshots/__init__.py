"""Snapshots: check-summed folders with a manifest, a serving part, the fleet's memory and a resume part."""
