"""From bytes to ids: exact tokens, and a spelling for bytes that no tokenizer call can spell."""

from collections import defaultdict
from collections.abc import Sequence

from omnidraft.errors import VocabularyError


class ByteTable:
    """The tokens of one vocabulary by their bytes. Where two ids spell the same, the lower one is meant."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._id_of: dict[bytes, int] = {}
        lengths: defaultdict[int, set[int]] = defaultdict(set)
        for token, spelled in enumerate(token_bytes):
            if spelled:
                self._id_of.setdefault(spelled, token)
                lengths[spelled[0]].add(len(spelled))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}

    def get(self, spelled: bytes) -> int | None:
        """The token that spells exactly this."""
        return self._id_of.get(spelled)

    def longest_match(self, data: bytes) -> list[int]:
        """Ids that spell the data: the longest token first, then the rest likewise.

        Raises:
            VocabularyError: at some byte no token matches.
        """
        ids: list[int] = []
        start = 0
        while start < len(data):
            token, num_bytes = self._first(data, start)
            ids.append(token)
            start += num_bytes
        return ids

    def _first(self, data: bytes, start: int) -> tuple[int, int]:
        for num_bytes in self._lengths.get(data[start], ()):
            token = self._id_of.get(data[start : start + num_bytes])
            if token is not None and start + num_bytes <= len(data):
                return token, num_bytes
        raise VocabularyError(f"no token spells byte {data[start]:#04x} before {data[start + 1 : start + 9]!r}")
