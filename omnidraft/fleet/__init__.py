"""Coordination of many processes: which snapshot serves, and the control log that says so."""
