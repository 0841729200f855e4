"""An engine with continuous batching, as vLLM's model runner calls a proposer, over a toy target."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeSession
from omnidraft.decode.drafting.session_pool import DrafterMemory, SessionPool
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.external.prompt_mapping import map_prompt
from omnidraft.decode.external.request_options import NO_OPTIONS, RequestOptions
from omnidraft.decode.external.round_scheduler import RoundScheduler
from omnidraft.decode.external.sequence_tracker import ExternalSequence, SequenceTracker, TokenBuffer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.ports import Policy, Request
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.toy_models import ToyTable
from omnidraft.traces.record import TraceRecord
from tests.unit.decode.toys import (
    ALIGNMENT,
    DRAFT_TOKENIZER,
    PROMPT,
    TARGET_EOS,
    TARGET_PIECES,
    TARGET_TOKENIZER,
    Strict,
    make_drafter,
)

NUM_TOKENS = 4
STOP_IDS = frozenset({TARGET_EOS})


@dataclass
class Clock:
    """A clock that a test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class EngineRequest:
    """A request as the engine has it."""

    ids: list[int]
    num_prompt: int
    max_tokens: int
    emitted: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    away: int = 0
    """Steps for which it is preempted."""
    unread: int = 1
    """Steps of prefill before its first token."""
    options: RequestOptions = NO_OPTIONS
    num_drafted: int = 0


class BatchingEngine:
    """Greedy over a table. Rows move, requests are preempted and aborted, prompts are read in chunks."""

    def __init__(
        self,
        rounds: RoundScheduler,
        table: ToyTable,
        *,
        max_seqs: int = 4,
        clock: Clock | None = None,
        pass_s: Callable[[int], float] = lambda rows: 1.0,
        seed: int = 0,
        trouble: float = 0.0,
    ) -> None:
        self.rounds = rounds
        self.waiting: list[EngineRequest] = []
        self.running: list[EngineRequest] = []
        self.num_passes = self.num_rows = 0
        self.width = max_seqs
        self._table = table
        self._clock = clock or Clock()
        self._pass_s = pass_s
        self._random = random.Random(seed)
        self._trouble = trouble

    def ask(self, prompt: Sequence[int], max_tokens: int, options: RequestOptions = NO_OPTIONS) -> EngineRequest:
        unread = self._random.randint(1, 2)
        request = EngineRequest(list(prompt), len(prompt), max_tokens, unread=unread, options=options)
        self.waiting.append(request)
        return request

    def run(self) -> None:
        while self.waiting or self.running:
            self.step()

    def step(self) -> None:
        """Schedule, pass, verify, propose: in the order of vLLM's model runner."""
        while self.waiting and len(self.running) < self.width:
            self.running.append(self.waiting.pop(0))
        self._disturb()
        batch = [each for each in self.running if not each.away]
        for each in self.running:
            each.away = max(each.away - 1, 0)
        if not batch:
            return
        logits = [self._logits(each) for each in batch]
        self.num_passes += 1
        self.num_rows += sum(map(len, logits))
        self._clock.now_s += self._pass_s(sum(map(len, logits)))
        emitted = [self._emit(each, rows) for each, rows in zip(batch, logits, strict=True)]
        drafts = self.rounds.next(
            emitted,
            lambda index: np.array(batch[index].ids, np.int32),
            lambda num_rows: logits if num_rows == [len(rows) for rows in logits] else None,
            lambda index: batch[index].options,
        )
        assert len(drafts) == len(batch)
        for each, its in zip(batch, drafts, strict=True):
            assert len(its) <= NUM_TOKENS
            assert all(0 <= token < len(TARGET_PIECES) for token in its)
            each.drafts = its
            each.num_drafted = max(each.num_drafted, len(its))
        self.running = [each for each in self.running if not self._is_over(each)]

    def _disturb(self) -> None:
        self._random.shuffle(self.running)
        for each in list(self.running):
            if self._random.random() < self._trouble:
                each.away, each.drafts = self._random.randint(1, 4), []
            elif self._random.random() < self._trouble / 4:
                self.running.remove(each)  # its client went away

    def _logits(self, request: EngineRequest) -> torch.Tensor:
        texts = [request.ids + request.drafts[:length] for length in range(len(request.drafts) + 1)]
        return torch.stack([self._table.logits(text) for text in texts])

    def _emit(self, request: EngineRequest, rows: torch.Tensor) -> list[int]:
        if request.unread:
            request.unread -= 1
            if request.unread:
                return []
        new: list[int] = []
        for row in rows:
            new.append(int(row.argmax()))
            if len(new) > len(request.drafts) or new[-1] != request.drafts[len(new) - 1]:
                break
        request.ids += new
        request.emitted += new
        return new

    def _is_over(self, request: EngineRequest) -> bool:
        return len(request.emitted) >= request.max_tokens or bool(STOP_IDS & set(request.emitted))


class ToyFactory:
    """Opens sequences over toys."""

    def __init__(self, *, is_traced: bool = False) -> None:
        self.slot: SnapshotSlot | None = None
        self.failures: DraftingFailures = Strict()
        self.records: list[TraceRecord] = []
        self._is_traced = is_traced
        self.num_opened = 0

    def open(self, prompt_ids: np.ndarray, options: RequestOptions) -> ExternalSequence:
        assert self.slot is not None
        snapshot = self.slot.current
        ids = prompt_ids.tolist()
        mapped, tail = map_prompt(ids, TARGET_TOKENIZER.vocabulary, DRAFT_TOKENIZER, ALIGNMENT, longest=2048)
        tenant = options.tenant or "default"
        request = Request(tuple(ids), mapped, 1000, stop_ids=STOP_IDS, mode="fast", drafter_prompt_tail=tail)
        state = SafeSession(snapshot.proposer, request, len(TARGET_PIECES), self.failures)
        self.num_opened += 1
        builder = None
        if self._is_traced and options.is_stored:
            context = RecordContext(f"text-{self.num_opened}", tenant, "w", "t", "d", snapshot.version, "a")
            builder = TraceRecordBuilder(request, context, self.records.append, segment_tokens=8)
        return ExternalSequence(TokenBuffer(prompt_ids), snapshot, state, builder, options=options)


def make_rounds(
    *,
    proposer: TreeProposer | None = None,
    factory: ToyFactory | None = None,
    policy: Policy | None = None,
    update_pass: Callable[[int, float], object] = lambda rows, seconds: None,
    metrics: CountingMetrics | None = None,
    clock: Clock | None = None,
    memory: DrafterMemory | None = None,
    keep_left_s: float = 100.0,
    max_inactive: int = 50,
    failures: DraftingFailures | None = None,
) -> tuple[RoundScheduler, SnapshotSlot, SequenceTracker]:
    """The real rounds over toys; what fails ends the test unless `failures` are counted."""
    clock = clock or Clock()
    memory = memory or DrafterMemory(100_000)
    proposer = proposer or make_drafter(has_lookup=True)
    chosen_policy = policy or FixedPolicy()
    proposer.policy_for = lambda mode: chosen_policy
    *others, drafter = proposer.sources
    proposer.sources = (*others, replace(drafter, pool=SessionPool(memory), extends_to_depth=True))
    slot = SnapshotSlot(LoadedSnapshot(None, "base", proposer, None, None))
    tracker = SequenceTracker(keep_s=keep_left_s, max_inactive=max_inactive, clock=clock)
    factory = factory or ToyFactory()
    factory.slot, factory.failures = slot, failures or Strict()
    rounds = RoundScheduler(
        factory.open,
        tracker,
        update_pass,
        memory,
        metrics or CountingMetrics(),
        target="t",
        stop_ids=STOP_IDS,
        top_k=4,
        num_tokens=lambda tenant: NUM_TOKENS,
        failures=failures or Strict(),
        clock=clock,
    )
    return rounds, slot, tracker


def plain(table: ToyTable, request: EngineRequest) -> list[int]:
    """Return the text of plain decoding, as long as the emitted one."""
    ids = request.ids[: request.num_prompt]
    while len(ids) < len(request.ids):
        ids.append(int(table.logits(ids).argmax()))
    return ids[request.num_prompt :]


def prompts(num: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Different texts; some are the same."""
    rng = random.Random(seed)
    pieces = ["abc ", "he.", "cd\n", "ab", "fgh ", "\u20ac "]
    return [
        PROMPT + tuple(TARGET_TOKENIZER.encode("".join(rng.choices(pieces, k=rng.randint(0, 4))))) for _ in range(num)
    ]
