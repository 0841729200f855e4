"""Resolving a model's name to a local folder: the catalog, the hub, PyPI wheels, GGUF conversion."""
