"""The OpenAI-compatible HTTP application of the embedded engine."""
