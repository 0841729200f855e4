"""Models that transformers loads: tokenizers, target, drafter, and the trainable drafter."""
