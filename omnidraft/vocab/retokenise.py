"""Incremental retokenisation: the ids in one vocabulary of a text that another model emits.

A text is cut at safe boundaries (tokenizer.py) into segments, and each segment is tokenised by itself; so a text
that grows is tokenised again only from the beginning of its last segment. A segment has at most MAX_SEGMENT characters,
which bounds the work for an endless run of letters or spaces.
A text that goes on is tokenised as if a word followed: GPT-2's pre-tokenizer takes two line breaks at the end of a text
as one token, and as two before a word, so a drafter never saw the first where it is asked to go on.
Bytes that are not UTF-8 are surrogates in the text (PEP 383).
A special id divides a text: the parts before and after it are tokenised by themselves, and it becomes the other
vocabulary's special id of the same role, or nothing if there is none.
Source: docs/algorithms.md section 5.
"""

import codecs
import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from omnidraft.vocab.alignment import Alignment
from omnidraft.vocab.tokenizer import Tokenizer, Vocabulary

MAX_SEGMENT = 192
_NEXT_WORD = "a"
MIN_BATCH = 32  # fewer segments are tokenised sooner one by one than by waking threads


def tokenise_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """Return ids that spell exactly these bytes: the tokenizer's own if they do, else those of its byte table.

    Raises:
        VocabularyError: some byte cannot be spelled at all.
    """
    text = data.decode("utf-8", "surrogateescape")
    return _tokenise(tokenizer, _segments(text, tokenizer.vocabulary.boundary))


def runs(ids: Sequence[int], vocabulary: Vocabulary) -> Iterator[tuple[bool, list[int]]]:
    """Split ids into runs of special ids and runs of text; yield (whether it is special, run)."""
    for is_special, run in groupby(ids, key=vocabulary.special_ids.__contains__):
        yield is_special, list(run)


def retokenise(target_ids: Sequence[int], target: Vocabulary, tokenizer: Tokenizer, alignment: Alignment) -> list[int]:
    """Return a text of the target that ended in the drafter's ids: those of a TailTokeniser, to the white space at its
    end.

    Raises:
        VocabularyError: some byte cannot be spelled at all.
    """
    ids: list[int] = []
    for is_special, run in runs(target_ids, target):
        ids += map_special_ids(run, alignment) if is_special else tokenise_bytes(tokenizer, target.spell(run))
    return ids


def map_special_ids(special_ids: Sequence[int], alignment: Alignment) -> list[int]:
    """Return the drafter's special ids of the same roles; ids without a counterpart are left out."""
    return [partner for token in special_ids for partner in alignment.draft_pieces(token)]


class TailTokeniser:
    """The ids of a prompt and of a growing text after it."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        self._ids = list(prompt_ids)
        self._tail = ""  # the last segment, which may still grow
        self._num_settled = len(self._ids)  # ids before the tail

    @property
    def ids(self) -> list[int]:
        """The ids of prompt and text without the pending bytes. It is the internal list: copy it to keep it."""
        return self._ids

    @property
    def pending(self) -> bytes:
        """Bytes at the end that begin a character; they are tokenised when it is complete."""
        return self._decoder.getstate()[0]

    def append(self, data: bytes) -> int:
        """Add bytes to the text; return the number of leading ids that did not change.

        Raises:
            VocabularyError: some byte cannot be spelled at all; nothing may be appended afterwards.
        """
        return self._append_text(self._decoder.decode(data))

    def append_special(self, special_ids: Sequence[int]) -> None:
        """End the text and append special ids; another text may follow. Raises as `end` does."""
        self.end()
        self._ids += special_ids
        self._num_settled = len(self._ids)

    def end(self) -> int:
        """End the text; return the number of leading ids that did not change.

        Raises:
            VocabularyError: a byte of a character that never ended cannot be spelled.
        """
        unchanged = self._append_text(self._decoder.decode(b"", final=True))
        ended = _tokenise(self._tokenizer, [self._tail] if self._tail else [])
        return min(unchanged, self._replace_tail(ended, [], ""))

    def _append_text(self, text: str) -> int:
        if not text:
            return len(self._ids)
        segments = _segments(self._tail + text, self._tokenizer.vocabulary.boundary)
        settled, last = _tokenise(self._tokenizer, segments[:-1]), _tokenise_last(self._tokenizer, segments[-1])
        return self._replace_tail(settled, last, segments[-1])

    def _replace_tail(self, settled: list[int], last: list[int], tail: str) -> int:
        """Replace the ids of the tail by others and those of a new tail; return the number of ids that stayed."""
        after = settled + last
        unchanged = self._num_settled + _num_equal(self._ids[self._num_settled :], after)
        self._ids[self._num_settled :] = after
        self._num_settled += len(settled)
        self._tail = tail
        return unchanged


def _segments(text: str, boundary: re.Pattern[str]) -> list[str]:
    """Cut a text. A cut depends on the segment before it and one character after it, so appending moves none."""
    segments: list[str] = []
    start = 0
    while start < len(text):
        cut = boundary.search(text, start + 1, min(start + MAX_SEGMENT + 1, len(text)))
        end = cut.start() if cut else start + MAX_SEGMENT
        segments.append(text[start:end])
        start = end
    return segments


def _tokenise(tokenizer: Tokenizer, segments: Sequence[str]) -> list[int]:
    if not segments:
        return []
    valid = [segment if not _is_invalid_utf8(segment) else "" for segment in segments]
    is_long = len(valid) >= MIN_BATCH
    proposals = tokenizer.encode_batch(valid) if is_long else [tokenizer.encode(each) for each in valid]
    ids: list[int] = []
    for segment, proposed in zip(segments, proposals, strict=True):
        data = segment.encode("utf-8", "surrogateescape")
        is_exact = tokenizer.vocabulary.spell(proposed) == data
        ids += proposed if is_exact else tokenizer.vocabulary.byte_table.longest_match(data)
    return ids


def _tokenise_last(tokenizer: Tokenizer, segment: str) -> list[int]:
    """Return the ids of the last segment as those that they will be before a word, if none of them reaches into it."""
    if segment[-1].isspace():
        data = segment.encode("utf-8", "surrogateescape")
        ids = tokenizer.encode(segment + _NEXT_WORD)
        num_bytes = tokenizer.vocabulary.num_bytes[ids].cumsum()
        before_word = ids[: int(num_bytes.searchsorted(len(data), side="right"))]
        if tokenizer.vocabulary.spell(before_word) == data:
            return before_word
    return _tokenise(tokenizer, [segment])


def _is_invalid_utf8(segment: str) -> bool:
    """Return whether the first character is a surrogate; boundaries surround these, so a segment has only or none."""
    return "\ud800" <= segment[0] <= "\udfff"


def _num_equal(before: Sequence[int], after: Sequence[int]) -> int:
    for index, (old, new) in enumerate(zip(before, after, strict=False)):
        if old != new:
            return index
    return min(len(before), len(after))
