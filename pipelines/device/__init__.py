"""One user on one device: what learning in idle moments gains, and what it costs."""
