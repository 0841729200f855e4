"""Checks on the user's own models that speculation changes nothing: equal texts and equal distributions."""
