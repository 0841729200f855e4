"""Policies decide the number of tokens to draft; each implements ports.Policy."""
