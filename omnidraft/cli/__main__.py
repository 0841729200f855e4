"""`python -m omnidraft.cli`."""

from omnidraft.cli import main

main()
