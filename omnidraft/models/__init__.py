"""Model backends and the files they are loaded from; the only package that imports transformers."""
