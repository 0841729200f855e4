"""What concerns many processes at once: which snapshot serves, and telling everybody."""
