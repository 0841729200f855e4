"""From decoded steps to trace records in the log: built, redacted, produced by a thread of its own."""
