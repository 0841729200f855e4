"""From a model's name to a folder on this disk: the catalog, the hub, PyPI wheels, GGUF conversion."""
