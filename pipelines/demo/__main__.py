"""`python -m pipelines.demo` is `omnidraft demo`."""

from omnidraft.cli.demo import demo as main
from omnidraft.hosts import process

if __name__ == "__main__":
    process.entry("demo", main)
