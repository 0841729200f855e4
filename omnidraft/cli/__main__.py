"""`python -m omnidraft.cli`."""

from omnidraft.cli import entry

entry()
