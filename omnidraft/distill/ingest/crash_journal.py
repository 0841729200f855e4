"""Which records a learner's process died of: named in a file before they are tried, so that the next process knows.

A process that finds records under way follows one that died over them, of whatever cause. After `tries` deaths a
step's records are tried one by one; one that is there at as many deaths alone is poison. Where each of them survives
alone, the step is tried again, and after `tries` deaths more they are poison together. Whoever was killed by chance is
learned in the same step as ever.
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from omnidraft.ports import Offsets
from omnidraft.private_files import PRIVATE
from omnidraft.snapshots import files

Place = tuple[int, int]
"""(partition, offset)."""

logger = logging.getLogger(__name__)


class CrashJournal:
    """Of one distiller; the folder of `path` must outlive its process."""

    def __init__(self, path: Path, *, tries: int) -> None:
        """Counts the death of the process before, if it died in a step. `tries` = 0: no file, no poison."""
        self._path, self._tries = path, tries
        self._together: Counter[Place] = Counter()  # deaths in steps
        self._alone: Counter[Place] = Counter()
        self._survived: set[Place] = set()
        self._under_way: tuple[Place, ...] = ()
        self._is_alone = False
        self._is_written = True
        if tries:
            self._load()
        self.poison = {place for place in {*self._together, *self._alone} if self._is_poison(place)}
        """Fixed for as long as this process learns from one log."""

    def suspects(self, places: Iterable[Place]) -> list[Place]:
        """Those that are to be tried alone."""
        return [
            place
            for place in places
            if self._tries and self._together[place] >= self._tries and place not in self._survived
        ]

    def start(self, places: Sequence[Place], *, alone: bool = False) -> None:
        """These are tried next; on disk when this returns."""
        self._under_way, self._is_alone = tuple(places), alone
        self._save()

    def finish(self) -> None:
        """They did no harm."""
        if self._is_alone:
            self._survived.update(self._under_way)
        else:
            self._forget(self._under_way)
        self._under_way = ()
        self._save()

    def published(self, offsets: Offsets) -> None:
        """What lies before these offsets does not come up again."""
        known = {*self._together, *self._alone, *self._survived}
        passed = [(partition, offset) for partition, offset in known if offset < offsets.get(partition, 0)]
        if passed:
            self._forget(passed)
            self._save()

    def clear(self) -> None:
        """Places name other records from now on."""
        for known in (self._together, self._alone, self._survived, self.poison):
            known.clear()
        self._save()

    def _is_poison(self, place: Place) -> bool:
        return self._alone[place] >= self._tries or self._together[place] >= 2 * self._tries

    def _forget(self, places: Iterable[Place]) -> None:
        for place in places:
            self._together.pop(place, None)
            self._alone.pop(place, None)
            self._survived.discard(place)

    def _load(self) -> None:
        if not self._path.exists():
            return
        try:
            told = json.loads(self._path.read_bytes())
            self._together, self._alone = (_counts(told[name]) for name in ("together", "alone"))
            self._survived = {_place(each) for each in told["survived"]}
            died_over = [_place(each) for each in told["under_way"]]
            (self._alone if told["is_alone"] else self._together).update(died_over)
        except (ValueError, KeyError, TypeError, OSError) as exc:
            logger.warning("%s cannot be read, so deaths are counted anew: %s", self._path, exc)
            return
        if died_over:
            logger.warning("the process before died over the records at %s", ", ".join(map(_text, died_over)))
            self._save()

    def _save(self) -> None:
        """A disk that takes no note stops nobody: a death of now would not be counted, that is all."""
        if not self._tries:
            return
        try:
            self._write()
        except OSError as exc:
            if self._is_written:
                logger.warning("what is tried cannot be noted, so learning goes on without: %s", exc)
            self._is_written = False
        else:
            self._is_written = True

    def _write(self) -> None:
        if not (self._under_way or self._together or self._alone or self._survived):
            self._path.unlink(missing_ok=True)
            return
        files.make_folder(self._path.parent)
        files.write_text(self._path, json.dumps(self._plain_data()), PRIVATE)

    def _plain_data(self) -> dict[str, Any]:
        return {
            "under_way": list(self._under_way),
            "is_alone": self._is_alone,
            "together": [[*place, number] for place, number in self._together.items()],
            "alone": [[*place, number] for place, number in self._alone.items()],
            "survived": sorted(self._survived),
        }


def _counts(told: Iterable[Sequence[int]]) -> Counter[Place]:
    return Counter({_place(each): int(each[2]) for each in told})


def _place(told: Sequence[int]) -> Place:
    return int(told[0]), int(told[1])


def _text(place: Place) -> str:
    return "{}:{}".format(*place)
