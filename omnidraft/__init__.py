"""omnidraft: speculative decoding that works across tokenizers and keeps learning while it serves."""

__version__ = "0.1.0"
