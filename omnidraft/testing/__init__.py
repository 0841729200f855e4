"""Toy models, tiny models and a log in memory: fakes that fulfil the contracts of the ports."""
