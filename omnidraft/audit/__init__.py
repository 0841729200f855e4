"""The audit checks snapshots against the log and its dead letters: was every acknowledged record learned once?

A manifest counts the offsets before it by disposition; the newest snapshot holds the keys of the last records that
went through; a dead letter names its origin. The disposition that each offset should have had is decided again by the
same rules.
"""
