"""Anthropic's Messages API, translated into chat requests and back; no second way to the engine."""
