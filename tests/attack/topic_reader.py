"""Reads all of a topic in a process of its own, and tells what became of every offset, and how much memory it took.

`python -m tests.attack.topic_reader BOOTSTRAP TOPIC`; one JSON object on stdout.
"""

import hashlib
import json
import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path

from omnidraft.bus.kafka_log import KafkaReader

PATIENCE_S = 60.0
"""Without any progress."""


def private_mib() -> float:
    """Memory of this process alone, without the pages of the libraries' files: torch maps 230 MiB of them."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


class Peak(threading.Thread):
    """The most that `private_mib` said."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib, self._stop_now = private_mib(), threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(0.005):
            self.mib = max(self.mib, private_mib())

    def stop(self) -> float:
        self._stop_now.set()
        self.join()
        return self.mib


def main(bootstrap: str, topic: str) -> None:
    peak, before_mib = Peak(), private_mib()
    peak.start()
    fates, digests, started_s = Counter[str](), dict[str, str](), time.monotonic()
    with closing(KafkaReader(bootstrap, topic)) as reader:
        ends, moved_s, reached = reader.end_offsets(), time.monotonic(), dict.fromkeys(reader.partitions(), 0)
        while any(reached[partition] < end for partition, end in ends.items()):
            polled = reader.poll(1000, 1.0)
            for message in polled.messages:
                fates[message.damage.reason if message.damage else "read"] += message.next_offset - message.offset
                if message.damage is None:
                    digests[str(message.offset)] = hashlib.blake2b(message.value, digest_size=8).hexdigest()
            reached |= polled.next_offsets
            moved_s = time.monotonic() if polled.next_offsets else moved_s
            if time.monotonic() - moved_s > PATIENCE_S:
                break
    figures = {"seconds": round(time.monotonic() - started_s, 1), "before_mib": before_mib, "peak_mib": peak.stop()}
    print(json.dumps(figures | {"fates": fates, "reached": reached, "ends": dict(ends), "digests": digests}))


if __name__ == "__main__":
    main(*sys.argv[1:])
