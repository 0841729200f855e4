"""What operators see: counters and distributions."""
