"""Runs that end: demo, bench, record."""
