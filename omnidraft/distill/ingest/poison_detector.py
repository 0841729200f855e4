"""Finds records that crash the process: a journal names those of a step before it, for the process after a crash.

A process that finds records under way follows one that crashed on them, whatever the cause. After `tries` crashes a
step's records are tried one by one; a record with as many crashes alone is poison. Where each of them survives alone,
the step is tried again, and after `tries` more crashes they are poison together. Records of a process that was killed
by chance are learned in the same step as ever. While a step waits for something else, the journal is suspended: whoever
ends the process then does not accuse the step's records.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnidraft import files
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.ports import Offsets
from omnidraft.private_files import PRIVATE

SNAPSHOT = -1
"""Stands for the partition of held-out records that a snapshot holds; their keys stand for the offsets."""

TRIES = 3
"""Crashes over a step's records after which they are tried one by one, and over a single record after which it is
dead-lettered: fewer would accuse records of what chance did."""

logger = logging.getLogger(__name__)


class PoisonDetector:
    """The poison of one distiller's log, and its journal; the folder of `path` must outlive its process."""

    def __init__(self, path: Path, *, tries: int) -> None:
        """Count the crash of the process before, if it crashed in a step. `tries` = 0: no file, no poison."""
        self._path, self._tries = path, tries
        self._together: Counter[PartitionOffset] = Counter()  # crashes in steps
        self._alone: Counter[PartitionOffset] = Counter()
        self._survived: set[PartitionOffset] = set()
        self._under_way: tuple[PartitionOffset, ...] = ()
        self._is_alone = False
        self._is_suspended = False
        self._is_written = True
        if tries:
            self._load()
        self.poison = {position for position in {*self._together, *self._alone} if self._is_poison(position)}
        """Fixed for as long as this process learns from one log."""

    def suspects(self, positions: Iterable[PartitionOffset]) -> list[PartitionOffset]:
        """Return the positions of the records that are to be tried alone."""
        return [
            position
            for position in positions
            if self._tries and self._together[position] >= self._tries and position not in self._survived
        ]

    def start(self, positions: Sequence[PartitionOffset], *, alone: bool = False) -> None:
        """Note that these records are tried next; on disk when this returns."""
        self._under_way, self._is_alone = tuple(positions), alone
        self._save()

    def finish(self) -> None:
        """Note that the records under way did no harm."""
        if self._is_alone:
            self._survived.update(self._under_way)
        else:
            self._forget(self._under_way)
        self._under_way = ()
        self._save()

    def suspend(self) -> None:
        """Note no records as under way from now on: the process may end at any moment, and not because of them."""
        if not self._is_suspended:
            self._is_suspended = True
            self._save_if_under_way()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend the journal inside the block."""
        was_suspended = self._is_suspended
        self.suspend()
        yield
        self._is_suspended = was_suspended
        self._save_if_under_way()

    def published(self, offsets: Offsets) -> None:
        """Forget the records before these offsets, which do not come up again, and those of the snapshot before."""
        known = {*self._together, *self._alone, *self._survived}
        passed = [each for each in known if each[0] == SNAPSHOT or each[1] < offsets.get(each[0], 0)]
        if passed:
            self._forget(passed)
            self._save()

    def clear(self) -> None:
        """Forget everything, as positions name other records from now on."""
        for known in (self._together, self._alone, self._survived, self.poison):
            known.clear()
        self._save()

    def _is_poison(self, position: PartitionOffset) -> bool:
        return self._alone[position] >= self._tries or self._together[position] >= 2 * self._tries

    def _forget(self, positions: Iterable[PartitionOffset]) -> None:
        for position in positions:
            self._together.pop(position, None)
            self._alone.pop(position, None)
            self._survived.discard(position)

    def _load(self) -> None:
        if not self._path.exists():
            return
        try:
            data = json.loads(self._path.read_bytes())
            self._together, self._alone = (_counts(data[name]) for name in ("together", "alone"))
            self._survived = {_position(each) for each in data["survived"]}
            died_over = [_position(each) for each in data["under_way"]]
            (self._alone if data["is_alone"] else self._together).update(died_over)
        except (ValueError, KeyError, TypeError, OSError) as exc:
            logger.warning("%s cannot be read, so crashes are counted anew: %s", self._path, exc)
            return
        if died_over:
            logger.warning("the process before crashed on the records at %s", ", ".join(map(_text, died_over)))
            self._save()

    def _save_if_under_way(self) -> None:
        if self._under_way:
            self._save()

    def _save(self) -> None:
        """Write the journal. A disk that refuses it does not stop learning: a crash would go uncounted, that is all."""
        if not self._tries:
            return
        try:
            self._write()
        except OSError as exc:
            if self._is_written:
                logger.warning("the crash journal cannot be written, so learning goes on without it: %s", exc)
            self._is_written = False
        else:
            self._is_written = True

    def _write(self) -> None:
        if not (self._accused() or self._together or self._alone or self._survived):
            self._path.unlink(missing_ok=True)
            return
        files.make_folder(self._path.parent)
        files.write_text(self._path, json.dumps(self._plain_data()), PRIVATE)

    def _accused(self) -> list[PartitionOffset]:
        """Return the records that a crash of this process would count for."""
        return [] if self._is_suspended else list(self._under_way)

    def _plain_data(self) -> dict[str, Any]:
        return {
            "under_way": self._accused(),
            "is_alone": self._is_alone,
            "together": [[*position, number] for position, number in self._together.items()],
            "alone": [[*position, number] for position, number in self._alone.items()],
            "survived": sorted(self._survived),
        }


def _counts(data: Iterable[Sequence[int]]) -> Counter[PartitionOffset]:
    return Counter({_position(each): int(each[2]) for each in data})


def _position(data: Sequence[int]) -> PartitionOffset:
    return int(data[0]), int(data[1])


def _text(position: PartitionOffset) -> str:
    return "{}:{}".format(*position)
