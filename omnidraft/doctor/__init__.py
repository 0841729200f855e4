"""What `omnidraft doctor` looks at: one small function for each thing, which says how it is and what to do about it."""
