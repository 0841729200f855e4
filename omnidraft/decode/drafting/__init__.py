"""Drafting: proposers that fill the draft tree, each one file behind ports.Proposer."""
