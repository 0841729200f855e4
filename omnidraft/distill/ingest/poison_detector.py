"""Finds records that crash the process: a journal names those of a step before it, for the process after a crash.

A process that finds records under way follows one that crashed on them, whatever the cause. After `tries` crashes a
record is tried alone, before its step; after twice as many it is poison, by itself or together with the others of its
step. Records of a process that was killed by chance are learned in the same step as ever. While a step waits for
something else, the journal is suspended: whoever ends the process then does not accuse the step's records.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from omnidraft import files
from omnidraft.distill.ingest.trace_consumer import PartitionOffset
from omnidraft.ports import Offsets
from omnidraft.private_files import PRIVATE

IN_SNAPSHOT = -1
"""Stands for the partition of held-out records that a snapshot has; their keys stand for the offsets."""

TRIES = 3
"""Crashes over a step's records after which they are tried one by one, and over a single record after which it is
dead-lettered: fewer would accuse records of what chance did."""

logger = logging.getLogger(__name__)


class PoisonDetector:
    """The poison of one distiller's log, and its journal; the folder of `path` must outlive its process."""

    def __init__(self, path: Path, *, tries: int) -> None:
        """Count the crash of the process before, if it crashed in a step. `tries` = 0: no file, no poison."""
        self._path, self._tries = path, tries
        self._crashes = Counter[PartitionOffset]()
        self._under_way: tuple[PartitionOffset, ...] = ()
        self._is_suspended, self._is_written = False, True
        if tries and path.exists():
            self._load()
        self.poison = {position for position, number in self._crashes.items() if number >= 2 * tries}
        """Fixed for as long as this process learns from one log."""

    def suspects(self, positions: Iterable[PartitionOffset]) -> list[PartitionOffset]:
        """Return the positions of the records that are to be tried alone."""
        return [each for each in positions if self._tries and self._crashes[each] >= self._tries]

    @contextmanager
    def trying(self, positions: Sequence[PartitionOffset], *, alone: bool = False) -> Iterator[None]:
        """Have it on the disk, while the block runs, that these records are tried. At its end they are acquitted, but
        for what they do together with others where they were tried `alone`; an error is no crash, and no acquittal."""
        self._under_way = tuple(positions)
        self._save()
        yield
        if not alone:
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
        passed = [each for each in self._crashes if each[0] == IN_SNAPSHOT or each[1] < offsets.get(each[0], 0)]
        if passed:
            self._forget(passed)
            self._save()

    def clear(self) -> None:
        """Forget everything, as positions name other records from now on."""
        self._crashes.clear()
        self.poison.clear()
        self._save()

    def _forget(self, positions: Iterable[PartitionOffset]) -> None:
        for position in positions:
            self._crashes.pop(position, None)

    def _load(self) -> None:
        try:
            data = json.loads(self._path.read_bytes())
            self._crashes = Counter({(int(each[0]), int(each[1])): int(each[2]) for each in data["crashes"]})
            crashed_on = [(int(each[0]), int(each[1])) for each in data["under_way"]]
        except (ValueError, LookupError, TypeError, OSError) as exc:
            logger.warning("%s cannot be read, so crashes are counted anew: %s", self._path, exc)
            return
        if crashed_on:
            self._crashes.update(crashed_on)
            logger.warning(
                "the process before crashed on the records at %s", ", ".join(map("{0[0]}:{0[1]}".format, crashed_on))
            )
            self._save()

    def _save_if_under_way(self) -> None:
        if self._under_way:
            self._save()

    def _save(self) -> None:
        """Write the journal. A disk that refuses it does not stop learning: a crash would go uncounted, that is all."""
        if not self._tries:
            return
        try:
            self._write([] if self._is_suspended else list(self._under_way))
        except OSError as exc:
            if self._is_written:
                logger.warning("the crash journal cannot be written, so learning goes on without it: %s", exc)
            self._is_written = False
        else:
            self._is_written = True

    def _write(self, under_way: Sequence[PartitionOffset]) -> None:
        if not (under_way or self._crashes):
            self._path.unlink(missing_ok=True)
            return
        files.make_folder(self._path.parent)
        crashes = [[*position, number] for position, number in self._crashes.items()]
        files.write_text(self._path, json.dumps({"under_way": under_way, "crashes": crashes}), PRIVATE)
