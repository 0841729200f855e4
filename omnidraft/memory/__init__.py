"""Suffix memory: earlier texts, indexed so that what followed the end of a running text is found in microseconds."""
