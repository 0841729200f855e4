"""The controller service: decides which snapshot serves."""
