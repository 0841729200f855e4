"""Decides which sequences take part in a round, and how many prompt ids are read in it.

Sequences are admitted fairly over clients, as many as fit the memory for keys; when it runs short, cached prefixes go
first and the newest sequence is preempted after them. Prompts are read in chunks beside the running sequences, each as
large as the gap between two tokens may grow by.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from omnidraft.config import SchedulerSettings
from omnidraft.decode.fairness import clients_of, is_unfair_to, most_admitted
from omnidraft.decode.prefill_chunk import PassSeconds, chunk_beside, chunk_between
from omnidraft.decode.prefix_cache import PrefixCache
from omnidraft.decode.sequence import SequenceState
from omnidraft.ports import Mode, Target, TreeLimits

_MIN_REUSED = 16
"""Common ids that are worth waiting for until another sequence has read them."""


@dataclass(slots=True)
class ScheduledRound:
    """The sequences of which the target computes rows in one pass."""

    running: list[SequenceState] = field(default_factory=list)
    """Sequences whose next tokens are drawn."""
    replays: list[tuple[SequenceState, int]] = field(default_factory=list)
    """Preempted sequences, with the number of emitted ids whose keys are computed again."""
    prompts: list[tuple[SequenceState, int]] = field(default_factory=list)
    """Sequences with the number of prompt ids that are read."""
    failed: list[tuple[SequenceState, Exception]] = field(default_factory=list)
    """Sequences that the target refused."""

    @property
    def num_other_rows(self) -> int:
        """Rows besides those of running sequences and their drafts."""
        return sum(num for _, num in (*self.replays, *self.prompts))


class Scheduler:
    """The waiting and the admitted sequences of one target. One thread."""

    def __init__(self, target: Target, settings: SchedulerSettings) -> None:
        self._target = target
        self._settings = settings
        self._waiting: list[SequenceState] = []
        self._admitted: list[SequenceState] = []
        """In the order in which they were admitted."""
        self.prefixes = PrefixCache()
        self.num_preemptions = 0
        self._reserved_bytes = 0
        """The memory for keys that belong to no sequence."""

    @property
    def sequences(self) -> list[SequenceState]:
        return [*self._admitted, *self._waiting]

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    def has_room(self, client: str, reserved: Sequence[str] = ()) -> bool:
        """Return whether a new sequence of this client would be admitted at once, if there is memory for it, behind the
        waiting ones.

        Args:
            reserved: the client of each sequence that has been promised room and is added later.
        """
        admitted = Counter(clients_of(self._admitted))
        for each in (*clients_of(self._waiting), *reserved):
            self._take_place(each, admitted)
        return self._take_place(client, admitted)

    def _take_place(self, client: str, admitted: Counter[str]) -> bool:
        """Return whether a sequence of this client has a place, also one of a client that has more; count it if so."""
        is_full = admitted.total() >= self._settings.max_num_seqs
        if is_full and not is_unfair_to(client, admitted):
            return False
        if is_full:
            admitted[most_admitted(admitted)] -= 1
        admitted[client] += 1
        return True

    def add(self, sequence: SequenceState) -> None:
        """Add a new sequence; it waits for its turn."""
        self._waiting.append(sequence)

    def remove(self, sequence: SequenceState, *, keeps_keys: bool = False) -> None:
        """Remove a sequence; its keys stay for others when it is finished, or with `keeps_keys`."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._admitted.remove(sequence)
            if sequence.is_finished or keeps_keys:
                self.prefixes.add(sequence, self._bytes_of(sequence))
        sequence.close()

    def preempt(self, sequence: SequenceState) -> None:
        """Let a running sequence wait for its next turn before all that came later, and free the keys that it has."""
        self._admitted.remove(sequence)
        sequence.release()
        self._waiting.insert(0, sequence)
        self.num_preemptions += 1

    @contextmanager
    def reserve(self, num_ids: int, mode: Mode) -> Iterator[None]:
        """Keep memory for the keys of a prompt that is read outside the rounds. Prefixes and the newest sequences make
        room for it at once; the oldest sequence goes on beside it in any case."""
        reserved_bytes = self._target.kv_bytes(num_ids, mode)
        self._reserved_bytes += reserved_bytes
        try:
            self._preempt_for_memory()
            yield
        finally:
            self._reserved_bytes -= reserved_bytes

    def schedule(self, pass_s_of: Callable[[Mode], PassSeconds | None]) -> ScheduledRound:
        """Return the next round. `pass_s_of` a mode sizes the chunks of prompts; None where it was not measured."""
        scheduled = ScheduledRound()
        if self._waiting:
            self._preempt_for_fairness()
            self._admit(scheduled)
        self._preempt_for_memory()
        scheduled.running = self._running
        if len(scheduled.running) == len(self._admitted):
            return scheduled
        pass_s = pass_s_of(scheduled.running[0].request.mode) if scheduled.running else None
        rows = chunk_beside(len(scheduled.running), self._target.max_rows, pass_s)
        for sequence, num_ids in self._shares(rows).items():
            (scheduled.replays if sequence.num_unreplayed else scheduled.prompts).append((sequence, num_ids))
        return scheduled

    def scoring_rows(self, mode: Mode, pass_s: PassSeconds | None) -> int:
        """Return the number of prompt ids that a pass scores before the next round; `pass_s` as for chunks."""
        longest = self._target.limits(mode).longest_chain
        return chunk_between(longest, pass_s) if self._running else longest

    @property
    def _running(self) -> list[SequenceState]:
        """The admitted sequences whose next tokens are drawn."""
        return [each for each in self._admitted if not each.num_unread and not each.num_unreplayed]

    def _shares(self, num_rows: int) -> dict[SequenceState, int]:
        """Return how many ids each sequence reads or replays: every client has an equal share of the rows for its first
        ones, and what is left goes to those that were admitted first."""
        wanted = {each: self._num_wanted(each) for each in self._admitted}
        clients = Counter(each.client for each, num in wanted.items() if num)
        budgets = dict.fromkeys(clients, num_rows // max(len(clients), 1))
        shares, left = dict[SequenceState, int](), num_rows
        for each in filter(wanted.get, wanted):
            shares[each] = min(wanted[each], budgets[each.client])
            budgets[each.client] -= shares[each]
            left -= shares[each]
        for each, share in shares.items():
            shares[each] += min(wanted[each] - share, left)
            left -= shares[each] - share
        return {each: num for each, num in shares.items() if num}

    def _num_wanted(self, sequence: SequenceState) -> int:
        return min(sequence.num_unreplayed, self._limits(sequence).longest_chain) or sequence.num_unread

    def _admit(self, scheduled: ScheduledRound) -> None:
        """Admit the first sequence of the client with the fewest admitted ones, again and again. One that waits for a
        prefix does so to the end of the round, since no more is read in it."""
        running, readers = Counter(clients_of(self._admitted)), self._readers
        waiting = defaultdict[str, deque[tuple[int, SequenceState]]](deque)
        for position, each in enumerate(self._waiting):
            waiting[each.client].append((position, each))
        fairest = [(running[client], queue[0][0], client) for client, queue in waiting.items()]
        heapify(fairest)
        while fairest and len(self._admitted) < self._settings.max_num_seqs:
            client = heappop(fairest)[-1]
            sequence = waiting[client].popleft()[-1]
            if not self._waits_for_prefix(sequence, readers):
                if self._admitted and not self._has_memory_for(sequence):
                    return
                running[client] += self._try_open(sequence, scheduled)
                readers = self._readers
            if waiting[client]:
                heappush(fairest, (running[client], waiting[client][0][0], client))

    def _try_open(self, sequence: SequenceState, scheduled: ScheduledRound) -> bool:
        """Return whether the target admits this waiting sequence."""
        self._waiting.remove(sequence)
        try:
            self._open(sequence)
        except Exception as exc:  # whatever the target has against it is this sequence's end, and no other's
            sequence.end(exc)
            sequence.close()
            scheduled.failed.append((sequence, exc))
            return False
        return True

    def _open(self, sequence: SequenceState) -> None:
        request = sequence.request
        session = self._target.open(request.prompt_ids, request.max_new_tokens, request.mode)
        sequence.session = session
        num_reused = self._reuse(sequence)
        if not sequence.was_admitted:
            sequence.num_reused, sequence.was_admitted = num_reused, True
        self._admitted.append(sequence)

    def _reuse(self, sequence: SequenceState) -> int:
        """Take over the keys that the sequence has in common with another one; return their number."""
        if sequence.cache_scope is None:
            return 0
        ids = sequence.request.prompt_ids[:-1]
        found = self.prefixes.find(sequence.cache_scope, list(ids))
        sources = [] if found is None else [(found[1], found[0].session)]
        for other in self._admitted:
            if other.session is not None:
                kept = other.ids[: other.session.num_kept]
                num_shared = self.prefixes.num_shared(other.cache_scope, kept, sequence.cache_scope, list(ids))
                sources.append((num_shared, other.session))
        num_ids, source = max(sources, key=lambda each: each[0], default=(0, None))
        if source is None or not num_ids:
            return 0
        return self._target.reuse(sequence.open_session, source, num_ids)

    @property
    def _readers(self) -> list[SequenceState]:
        """The admitted sequences that are reading their prompts."""
        return [each for each in self._admitted if each.num_unread]

    def _waits_for_prefix(self, sequence: SequenceState, readers: Sequence[SequenceState]) -> bool:
        """Return whether one of these is reading what this one can reuse."""
        ids = sequence.request.prompt_ids
        for other in readers:
            prompt_ids = other.request.prompt_ids
            num_shared = self.prefixes.num_shared(other.cache_scope, prompt_ids, sequence.cache_scope, ids)
            if num_shared >= other.open_session.num_kept + _MIN_REUSED:
                return True
        return False

    def _preempt_for_fairness(self) -> None:
        """Let the newest sequences of the client with most of them wait, if a client with fewer waits for a place or
        for memory, and that is enough for it. Where only places are short, their keys stay as prefixes."""
        running, readers, admitted = Counter(clients_of(self._admitted)), self._readers, list(self._admitted)
        clients = {client for client in set(clients_of(self._waiting)) if is_unfair_to(client, running)}
        waiting = [each for each in self._waiting if each.client in clients]
        waiting.sort(key=lambda each: running[each.client])
        sequence = next((each for each in waiting if not self._waits_for_prefix(each, readers)), None)
        if sequence is None:
            return
        while not self._has_place_for(sequence, admitted):
            running = Counter(clients_of(admitted))
            if not is_unfair_to(sequence.client, running):
                return
            most = most_admitted(running)
            admitted.remove(next(each for each in reversed(admitted) if each.client == most))
        keys_fit = self._fit(*self._admitted, sequence)
        for each in reversed([each for each in self._admitted if each not in admitted]):
            if keys_fit:
                self.prefixes.add(each, self._bytes_of(each))
            self.preempt(each)

    def _has_place_for(self, sequence: SequenceState, admitted: Sequence[SequenceState]) -> bool:
        return not admitted or (len(admitted) < self._settings.max_num_seqs and self._fit(*admitted, sequence))

    def _fit(self, *sequences: SequenceState) -> bool:
        """Return whether there is memory for the keys of these sequences together, without any prefixes."""
        used_bytes = self._reserved_bytes + sum(map(self._bytes_of, sequences))
        return used_bytes <= self._settings.kv_cache_gib * 2**30

    def _preempt_for_memory(self) -> None:
        while self._used_bytes() > self._settings.kv_cache_gib * 2**30 and (self.prefixes or len(self._admitted) > 1):
            if self.prefixes:
                self.prefixes.evict()
            else:
                self.preempt(self._admitted[-1])

    def _has_memory_for(self, sequence: SequenceState) -> bool:
        """Return whether the sequence fits beside the admitted ones; prefixes give way where that is enough."""
        if not self._has_place_for(sequence, self._admitted):
            return False
        needed = self._bytes_of(sequence)
        while self._used_bytes() + needed > self._settings.kv_cache_gib * 2**30:
            self.prefixes.evict()
        return True

    def _used_bytes(self) -> float:
        return self._reserved_bytes + self.prefixes.kv_bytes + sum(map(self._bytes_of, self._admitted))

    def _bytes_of(self, sequence: SequenceState) -> int:
        """Return the memory of a sequence's keys after its next pass."""
        num_ids = len(sequence.ids) + self._limits(sequence).longest_chain
        return self._target.kv_bytes(num_ids, sequence.request.mode)

    def _limits(self, sequence: SequenceState) -> TreeLimits:
        return self._target.limits(sequence.request.mode)
