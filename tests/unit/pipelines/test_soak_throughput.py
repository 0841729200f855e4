"""The throughput part ends, and says why, when one of its processes ends early. No broker runs."""

from multiprocessing.connection import Connection
from typing import Any

import pytest

from omnidraft.demo.local_cluster import ServiceFailed
from pipelines.soak import throughput
from pipelines.soak.throughput import TopicLoad

LOAD = TopicLoad("localhost:9", "load", size_bytes=2_000, per_s=10, seconds=1.0)


def ends_early(load: TopicLoad, sender: Connection) -> None:
    """A process that says nothing."""


def is_ready(load: TopicLoad, sender: Connection) -> None:
    """A reader that ends after it said that it is at the beginning of the topic."""
    sender.send("ready")


@pytest.mark.parametrize(("reader", "name"), [(ends_early, "reader"), (is_ready, "writer")])
def test_a_process_that_ends_early_fails_the_part(reader: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an end of file the part would wait for ever."""
    monkeypatch.setattr(throughput, "_read", reader)
    monkeypatch.setattr(throughput, "_write", ends_early)
    monkeypatch.setattr(throughput, "_cpu_s", lambda cluster: 0.0)
    cluster: Any = None
    with pytest.raises(ServiceFailed, match=f"the {name} of the topic ended before its figures"):
        throughput.measure(LOAD, cluster)
