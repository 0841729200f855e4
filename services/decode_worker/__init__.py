"""The decode worker service: serves requests and records traces with the target's log-probabilities."""
