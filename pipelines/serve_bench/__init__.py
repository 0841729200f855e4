"""The parts of the HTTP server's measurement."""
