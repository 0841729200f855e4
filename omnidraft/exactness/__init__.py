"""Proof on the user's own models that speculation changes nothing: equality with plain decoding, and the law."""
