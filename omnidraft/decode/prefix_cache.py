"""Keys of sequences that ended or made way, for the next ones that begin with the same ids: another turn, a common
system prompt.

A sequence only finds what its own scope left behind, so that the time to its first token says nothing about others.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.sequence import SequenceState
from omnidraft.ports import TargetSession


@dataclass(frozen=True, slots=True, eq=False)
class CachedPrefix:
    """Ids whose keys a session of the target still has."""

    scope: str
    ids: Sequence[int]
    session: TargetSession
    kv_bytes: int


_Group = OrderedDict[CachedPrefix, int]
"""Prefixes with the number of their last use, the least recently used first."""


class PrefixCache:
    """Sessions of such sequences, the least recently used first."""

    def __init__(self) -> None:
        self._prefixes: _Group = OrderedDict()
        self._by_scope = defaultdict[str, _Group](OrderedDict)
        self._num_uses = 0
        self.kv_bytes = 0
        """The memory of all keys."""

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, sequence: SequenceState, kv_bytes: int) -> None:
        """Take over a sequence's keys, and their memory, in the place of prefixes that it continues."""
        session, sequence.session = sequence.session, None
        assert session is not None
        if sequence.cache_scope is None or not session.num_kept:
            session.close()
            return
        ids = sequence.ids[: session.num_kept]
        added = CachedPrefix(sequence.cache_scope, ids, session, kv_bytes)
        for each in [each for each in self._by_scope[added.scope] if _continues(added, each)]:
            self._remove(each)
        self._use(added)
        self.kv_bytes += kv_bytes

    def find(self, scope: str, ids: Sequence[int]) -> tuple[CachedPrefix, int] | None:
        """Return the scope's prefix that has the most of these ids in common, with their number; None without any."""
        lengths = {each: common_prefix(each.ids, ids) for each in self._by_scope.get(scope, ())}
        best = max(lengths, key=lambda each: (lengths[each], -self._prefixes[each]), default=None)
        if best is None or not lengths[best]:
            return None
        self._use(best)
        return best, lengths[best]

    def num_shared(self, source_scope: str | None, source: Sequence[int], scope: str | None, ids: Sequence[int]) -> int:
        """Return the number of leading ids whose keys a text of `scope` may take from a source: none of others."""
        return 0 if scope is None or source_scope != scope else common_prefix(source, ids)

    def evict(self) -> None:
        """Close the least recently used prefix."""
        self._remove(next(iter(self._prefixes)))

    def clear(self) -> None:
        """Close all prefixes."""
        while self._prefixes:
            self.evict()

    def _use(self, prefix: CachedPrefix) -> None:
        """Make this prefix the most recently used one."""
        self._num_uses += 1
        for group in self._groups(prefix):
            group[prefix] = self._num_uses
            group.move_to_end(prefix)

    def _remove(self, prefix: CachedPrefix) -> None:
        for group in self._groups(prefix):
            del group[prefix]
        if not self._by_scope[prefix.scope]:
            del self._by_scope[prefix.scope]
        self.kv_bytes -= prefix.kv_bytes
        prefix.session.close()

    def _groups(self, prefix: CachedPrefix) -> tuple[_Group, _Group]:
        return self._prefixes, self._by_scope[prefix.scope]


def _continues(longer: CachedPrefix, shorter: CachedPrefix) -> bool:
    return common_prefix(longer.ids, shorter.ids) == len(shorter.ids)
