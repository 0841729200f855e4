"""The drafter's KV caches of ended texts, each for the next text of its scope that begins with the same draft ids."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol
from weakref import WeakSet

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.ports import DraftSession

_MAX_ENDED = 64
"""Ended texts of one proposer at most, since a short one takes more memory than its ids."""


class KvHolder(Protocol):
    """A text whose draft ids have keys."""

    fed: list[int]


class DrafterMemory:
    """The limit of the ids whose keys all drafters of one host hold together, for running and for ended texts."""

    def __init__(self, max_ids: int) -> None:
        self._max_ids = max_ids
        self.num_forgotten = 0
        """How often what texts had left was forgotten."""
        self._running: WeakSet[KvHolder] = WeakSet()
        self._pools: WeakSet[SessionPool] = WeakSet()
        self.stamps = count()

    @property
    def num_ids(self) -> int:
        """The number of ids whose keys are held."""
        return self._num_running_ids + sum(pool.num_ids for pool in self._pools)

    @property
    def _num_running_ids(self) -> int:
        return sum(len(each.fed) for each in self._running)

    def hold(self, text: KvHolder) -> None:
        """Count the keys of a running text until it is freed or released."""
        self._running.add(text)

    def release(self, text: KvHolder, pool: "SessionPool") -> None:
        """Count the keys of this text no longer as those of a running one, but as those in its pool."""
        self._running.discard(text)
        self._pools.add(pool)

    def evict_all(self) -> None:
        """Free the keys of all ended texts."""
        for pool in self._pools:
            pool.ended = []

    def forget(self) -> None:
        """Free the keys of all ended texts; running ones leave none behind."""
        self.num_forgotten += 1
        self.evict_all()

    def fits(self, num_ids: int) -> bool:
        """Return whether keys of so many more ids fit where those of ended texts give way."""
        return self._num_running_ids + num_ids <= self._max_ids

    def reserve(self, num_ids: int) -> bool:
        """Return whether keys of so many more ids fit; those of ended texts give way, the least recently used first."""
        excess = self.num_ids + num_ids - self._max_ids
        while excess > 0 and (filled := [pool for pool in self._pools if pool.ended]):
            excess -= min(filled, key=lambda pool: pool.ended[0].stamp).evict()
        return excess <= 0


@dataclass(frozen=True, slots=True)
class EndedText:
    """The KV cache of a text that is not drafted for any more."""

    scope: Hashable
    session: DraftSession
    fed: list[int]
    stamp: int


class SessionPool:
    """The ended texts of one proposer, the least recently used one first."""

    def __init__(self, memory: DrafterMemory | None = None) -> None:
        """Share `memory` with other pools; None has no limit."""
        self.memory = memory or DrafterMemory(2**62)
        self.ended: list[EndedText] = []

    @property
    def num_ids(self) -> int:
        """The number of ids whose keys are held here."""
        return sum(len(each.fed) for each in self.ended)

    def put(self, scope: Hashable, session: DraftSession, fed: list[int]) -> None:
        """Hold the KV cache of a text that ended."""
        self.ended.append(EndedText(scope, session, fed, next(self.memory.stamps)))
        if len(self.ended) > _MAX_ENDED:
            self.evict()
        self.memory.reserve(0)

    def take(self, scope: Hashable, ids: Sequence[int]) -> EndedText | None:
        """Remove and return the scope's text that shares most leading ids with these. One that shares less than half
        of its own stays for another text."""
        shared = [(common_prefix(each.fed, ids), each) for each in self.ended if each.scope == scope]
        fitting = [(num, each) for num, each in shared if 2 * num >= len(each.fed)]
        if not fitting:
            return None
        _, best = max(fitting, key=lambda pair: (pair[0], pair[1].stamp))
        self.ended = [each for each in self.ended if each is not best]
        return best

    def evict(self) -> int:
        """Free the least recently used text; return the number of its ids."""
        return len(self.ended.pop(0).fed)
