"""Coordination of many processes: which snapshot serves, and the announcements that say so."""
