"""Was every acknowledged record learned, once? What snapshots say, against the log and its dead letters.

What can be known: a manifest counts what its learner did with the offsets before it, by fate; the newest snapshot
remembers the names of the last records that went through; a dead letter names its origin. The fate that each offset
should have had is decided again by the rules that decided it then.
"""
