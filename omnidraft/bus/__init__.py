"""Append-only logs with offsets: Kafka and SQLite. Each implements ports.LogWriter and ports.LogReader."""
