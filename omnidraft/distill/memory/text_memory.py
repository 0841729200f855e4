"""The texts of the fleet's memory: what was learned lately, by owner, within limits.

A text is a learned record's emitted ids after the last ids of its prompt, but for the one that ends a stop string,
which may reach behind what was shown. So what is held out, over its tenant's share, sampled out, a duplicate or poison
is not in the memory, as it is not in the weights.
The oldest text goes first. That is also the one least used: text that is drafted from a memory and accepted is said
again, and so it comes back as the newest. Everything depends on the order of the records alone, and all of it is in the
files of a snapshot, so a run that resumes from them makes the same files.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from omnidraft.config import MemorySettings
from omnidraft.distill.ingest.record_disposition import hash_63
from omnidraft.memory.memory_file import Owner, Owners
from omnidraft.memory.recent_texts import MemoryText
from omnidraft.ports import MemoryDropReason
from omnidraft.traces.record import STOP_STRING, TraceRecord

PROMPT_TOKENS = 64
"""Tokens of the end of a prompt kept before its answer, so that the answer's beginning is found too. More would keep
more of what users sent, and fewer answers."""


class Dated(Protocol):
    """A record, or a text of one."""

    @property
    def tenant(self) -> str: ...

    @property
    def time_ms(self) -> int: ...


class TextMemory:
    """The texts of one learner. It belongs to one thread."""

    def __init__(self, settings: MemorySettings, *, vocabulary_size: int) -> None:
        """Start without any text. Records with ids from `vocabulary_size`, the target's, on are left out."""
        self._settings, self._vocabulary_size = settings, vocabulary_size
        self._owners = Owners(settings.groups)
        self._texts: dict[Owner, deque[MemoryText]] = {}
        self._num_tokens = Counter[Owner]()
        self._segments: dict[Owner, set[tuple[int, int]]] = {}
        self._changed: set[Owner] = set()
        self._dropped = Counter[MemoryDropReason]()

    @property
    def num_tokens(self) -> int:
        """The number of tokens in all texts."""
        return self._num_tokens.total()

    def owners(self) -> list[Owner]:
        """Return those who have any text."""
        return sorted(self._texts)

    def texts_of(self, owner: Owner) -> Sequence[MemoryText]:
        """Return an owner's texts, oldest first."""
        return tuple(self._texts.get(owner, ()))

    def texts(self) -> list[MemoryText]:
        """Return the texts of all owners."""
        return [text for texts in self._texts.values() for text in texts]

    def changed(self) -> list[Owner]:
        """Return the owners whose texts are other ones than when `mark_written` was called for them."""
        return sorted(self._changed)

    def mark_written(self, owner: Owner) -> None:
        """Note that the owner's texts of now are in a file."""
        self._changed.discard(owner)

    def renew(self, tenant: str) -> None:
        """Have the file written anew that the tenant's texts would be in: its key is destroyed."""
        self.mark_changed(self._owners.of(tenant))

    def mark_changed(self, owner: Owner) -> None:
        """Have the owner's file written anew, if there are any texts."""
        if owner in self._texts:
            self._changed.add(owner)

    def add(self, records: Iterable[TraceRecord]) -> None:
        """Add the records of a step."""
        if not self._settings.tokens_per_tenant:
            return
        for record in records:
            ids_before = record.before_ids if record.segment else record.prompt_ids
            if self._is_known(record.emitted_ids) and self._is_known(ids_before):
                self._append(self._text(record, ids_before))
            else:
                self._dropped["unknown_ids"] += len(record.emitted_ids)
        self._limit()

    def restore(self, texts_of: Mapping[Owner, Sequence[MemoryText]]) -> None:
        """Go on with the texts of a snapshot's files. Groups and limits may have changed since."""
        self._texts, self._num_tokens, self._segments = {}, Counter(), {}
        for owner in sorted(texts_of):
            for text in texts_of[owner]:
                self._append(text)
        self._limit()
        owners = self._texts.keys() | texts_of.keys()
        self._changed = {each for each in owners if self.texts_of(each) != tuple(texts_of.get(each, ()))}

    def drop(self, is_dropped: Callable[[Dated], bool], reason: MemoryDropReason) -> None:
        """Drop texts."""
        for owner in self.owners():
            texts = self._texts[owner]
            dropped = [text for text in texts if is_dropped(text)]
            self._texts[owner] = deque(text for text in texts if not is_dropped(text))
            self._note_dropped(owner, dropped, reason)

    def take_dropped(self) -> Counter[MemoryDropReason]:
        """Return reason -> number of tokens that were dropped since the last call."""
        dropped, self._dropped = self._dropped, Counter()
        return dropped

    def _is_known(self, ids: np.ndarray) -> bool:
        return not len(ids) or int(ids.max()) < self._vocabulary_size

    def _text(self, record: TraceRecord, ids_before: np.ndarray) -> MemoryText:
        request = hash_63(record.request_id)
        segments = self._segments.get(self._owners.of(record.tenant), set())
        has_before = record.segment > 0 and (request, record.segment - 1) in segments
        num_context = 0 if has_before else min(PROMPT_TOKENS, len(ids_before))
        context = ids_before[len(ids_before) - num_context :]
        said_ids = record.emitted_ids[: -1 if record.finish_reason == STOP_STRING else None]
        ids = np.concatenate([context, said_ids]).astype(np.uint32)
        return MemoryText(record.tenant, request, record.segment, record.time_ms, num_context, ids)

    def _append(self, text: MemoryText) -> None:
        """Add a text that is not in the memory yet: a learner that is sent back in the log reads records again."""
        owner = self._owners.of(text.tenant)
        segments = self._segments.setdefault(owner, set())
        if (name := (text.request, text.segment)) in segments:
            return
        segments.add(name)
        self._texts.setdefault(owner, deque()).append(text)
        self._num_tokens[owner] += len(text.ids)
        self._changed.add(owner)
        while self._num_tokens.get(owner, 0) > self._settings.tokens_per_tenant:
            self._drop_oldest(owner)

    def _limit(self) -> None:
        """Drop texts until the limits for all owners hold: the oldest of the owner with most, and whole memories of the
        owners who were heard of longest ago."""
        while self.num_tokens > self._settings.total_tokens:
            largest = max(self.owners(), key=lambda owner: self._num_tokens[owner])
            self._drop_oldest(largest)
        while len(self._texts) > self._settings.max_tenants:
            quietest = min(self.owners(), key=lambda owner: max(text.time_ms for text in self._texts[owner]))
            self._drop_oldest(quietest, len(self._texts[quietest]))

    def _drop_oldest(self, owner: Owner, number: int = 1) -> None:
        texts = self._texts[owner]
        self._note_dropped(owner, [texts.popleft() for _ in range(number)], "full")

    def _note_dropped(self, owner: Owner, dropped: Sequence[MemoryText], reason: MemoryDropReason) -> None:
        num_tokens = sum(len(text.ids) for text in dropped)
        self._num_tokens[owner] -= num_tokens
        self._dropped[reason] += num_tokens
        self._segments[owner] -= {(text.request, text.segment) for text in dropped}
        if dropped:
            self._changed.add(owner)
        if not self._texts[owner]:
            del self._texts[owner], self._num_tokens[owner], self._segments[owner]
