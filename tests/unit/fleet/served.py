"""Traffic for tests: requests in figures, and trace records of a snapshot's requests."""

import random

import numpy as np

from omnidraft.fleet.request_stats import RequestStats
from omnidraft.ports import Outgoing
from omnidraft.testing.memory_log import MemoryWriter
from omnidraft.traces import codec
from tests.trace_records import make_record


def requests(dice: random.Random, agreement: float, number: int, *, version=1, tenant="t", ms=20.0, passes=30):
    """Requests of so many passes, each right by chance."""
    for _ in range(number):
        agreed = sum(dice.random() < agreement for _ in range(passes))
        tokens = passes + agreed
        seconds = sum(dice.gauss(ms, ms / 5) for _ in range(tokens)) / 1000
        yield RequestStats(0, tenant, version, tokens, seconds, passes, agreed)


def serve(writer: MemoryWriter, version: int, number: int, *, seconds: float, first: int = 0, target: str = "big"):
    """Put records of requests that this snapshot served into the log; a pass takes `seconds`, more or less."""
    dice = np.random.default_rng(first + version)
    for count in range(first, first + number):
        record = make_record(f"r{version}-{count}", snapshot_version=version, target=target, drafter="org/small")
        num_rounds = len(record.rounds.num_nodes_R)
        record.rounds.target_s_R[:] = seconds * dice.uniform(0.9, 1.1, num_rounds)
        writer.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])
