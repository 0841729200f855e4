"""Trials of what is about to be used, each in a process that may die, and the choice of what survived."""
