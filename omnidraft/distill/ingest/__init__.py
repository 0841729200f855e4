"""From the trace log to batches of records: consumed, deduplicated, held out, dead-lettered, resumed after a crash."""
