"""Keys of sequences that ended or made way, for the next ones that begin with the same ids: another turn, a common
system prompt.

A sequence only finds what its own scope left behind, so that the time to its first token says nothing about others.
"""

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


class PrefixCache:
    """Sessions of such sequences, the least recently used first."""

    def __init__(self, public: Sequence[Sequence[int]] = ()) -> None:
        """`public` prefixes are shared by all scopes."""
        self._public = tuple(map(list, public))
        self._prefixes: list[CachedPrefix] = []

    def __len__(self) -> int:
        return len(self._prefixes)

    @property
    def kv_bytes(self) -> int:
        """The memory of all keys."""
        return sum(each.kv_bytes for each in self._prefixes)

    def add(self, sequence: SequenceState, kv_bytes: int) -> None:
        """Take over a sequence's keys, and their memory, in the place of prefixes that it continues."""
        session, sequence.session = sequence.session, None
        assert session is not None
        if sequence.cache_scope is None or not session.num_kept:
            session.close()
            return
        added = CachedPrefix(sequence.cache_scope, sequence.ids[: session.num_kept], session, kv_bytes)
        for each in [each for each in self._prefixes if _continues(added, each)]:
            self._remove(each)
        self._prefixes.append(added)

    def find(self, scope: str, ids: Sequence[int]) -> tuple[CachedPrefix, int] | None:
        """Return the prefix that has the most of these ids in common, with their number; None without any."""
        lengths = [(self.num_shared(each.scope, each.ids, scope, ids), each) for each in self._prefixes]
        length, best = max(lengths, key=lambda each: each[0], default=(0, None))
        if best is None or not length:
            return None
        self._prefixes.remove(best)
        self._prefixes.append(best)
        return best, length

    def num_shared(self, source_scope: str | None, source: Sequence[int], scope: str | None, ids: Sequence[int]) -> int:
        """Return the number of leading ids whose keys a text of `scope` may take from a source: all common ones of its
        own scope, public ones of others."""
        if source_scope is None or scope is None:
            return 0
        num_common = common_prefix(source, ids)
        if source_scope == scope:
            return num_common
        return min(num_common, max((common_prefix(each, ids) for each in self._public), default=0))

    def evict(self) -> None:
        """Close the least recently used prefix."""
        self._remove(self._prefixes[0])

    def clear(self) -> None:
        """Close all prefixes."""
        while self._prefixes:
            self.evict()

    def _remove(self, prefix: CachedPrefix) -> None:
        self._prefixes.remove(prefix)
        prefix.session.close()


def _continues(longer: CachedPrefix, shorter: CachedPrefix) -> bool:
    same_scope = longer.scope == shorter.scope
    return same_scope and common_prefix(longer.ids, shorter.ids) == len(shorter.ids)
