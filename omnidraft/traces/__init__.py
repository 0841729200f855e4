"""The trace topic: what a record holds, and its bytes on the wire."""
