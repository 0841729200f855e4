"""Trials of kernels and matrix products, each in a process that may die, and the choice of what works here."""
