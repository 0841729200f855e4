"""Append-only logs with offsets: Kafka, SQLite, and memory for tests. Each is both ends of ports."""
