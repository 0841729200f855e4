"""The inverse of a vocabulary: from bytes to ids, also for bytes that no tokenizer call can spell."""

from collections import defaultdict
from collections.abc import Sequence

from omnidraft.errors import VocabularyError


class ByteTable:
    """The tokens of one vocabulary by their bytes. If two ids spell the same bytes, the lower one is used."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._id_of: dict[bytes, int] = {}
        lengths: defaultdict[int, set[int]] = defaultdict(set)
        for token, data in enumerate(token_bytes):
            if data:
                self._id_of.setdefault(data, token)
                lengths[data[0]].add(len(data))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}

    def get(self, data: bytes) -> int | None:
        """Return the token that spells exactly these bytes."""
        return self._id_of.get(data)

    def longest_match(self, data: bytes) -> list[int]:
        """Return ids that spell the data: the longest token that matches, then the same for the rest.

        Raises:
            VocabularyError: at some byte no token matches.
        """
        ids: list[int] = []
        start = 0
        while start < len(data):
            token, num_bytes = self._longest_token_at(data, start)
            ids.append(token)
            start += num_bytes
        return ids

    def _longest_token_at(self, data: bytes, start: int) -> tuple[int, int]:
        for num_bytes in self._lengths.get(data[start], ()):
            token = self._id_of.get(data[start : start + num_bytes])
            if token is not None and start + num_bytes <= len(data):
                return token, num_bytes
        raise VocabularyError(f"no token spells byte {data[start]:#04x} before {data[start + 1 : start + 9]!r}")
