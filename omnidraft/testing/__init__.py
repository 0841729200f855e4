"""Toy models, tiny models and a log in memory: fakes that keep the ports' promises."""
