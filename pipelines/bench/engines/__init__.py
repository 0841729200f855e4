"""Programs that compute passes of one model, ours and others', each in a process of its own."""
