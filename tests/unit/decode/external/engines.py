"""An engine with continuous batching, as vLLM's model runner calls a proposer, over a toy target."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from omnidraft.config import RecorderSettings
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.safe_drafting import DraftingFailures
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.external.batch_drafting import DraftingState
from omnidraft.decode.external.batch_policy import BatchPolicy, FixedBatchPolicy
from omnidraft.decode.external.prompt_mapping import map_prompt
from omnidraft.decode.external.round_scheduler import RoundLimits, RoundScheduler
from omnidraft.decode.external.sequence import ExternalSequence
from omnidraft.decode.external.sequence_tracker import SequenceTracker, TokenBuffer
from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.snapshot.slot import LoadedSnapshot, SnapshotSlot
from omnidraft.ports import Request
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
    """Stands still until somebody moves it."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(eq=False)
class Asked:
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
        self.waiting: list[Asked] = []
        self.running: list[Asked] = []
        self.num_passes = self.num_rows = 0
        self.width = max_seqs
        self._table = table
        self._clock = clock or Clock()
        self._pass_s = pass_s
        self._random = random.Random(seed)
        self._trouble = trouble

    def ask(self, prompt: Sequence[int], max_tokens: int) -> Asked:
        asked = Asked(list(prompt), len(prompt), max_tokens, unread=self._random.randint(1, 2))
        self.waiting.append(asked)
        return asked

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
            lambda place: np.array(batch[place].ids, np.int32),
            lambda num_rows: logits if num_rows == [len(rows) for rows in logits] else None,
        )
        assert len(drafts) == len(batch)
        for each, its in zip(batch, drafts, strict=True):
            assert len(its) <= NUM_TOKENS
            assert all(0 <= token < len(TARGET_PIECES) for token in its)
            each.drafts = its
        self.running = [each for each in self.running if not self._is_over(each)]

    def _disturb(self) -> None:
        self._random.shuffle(self.running)
        for each in list(self.running):
            if self._random.random() < self._trouble:
                each.away, each.drafts = self._random.randint(1, 4), []
            elif self._random.random() < self._trouble / 4:
                self.running.remove(each)  # its client went away

    def _logits(self, asked: Asked) -> torch.Tensor:
        texts = [asked.ids + asked.drafts[:length] for length in range(len(asked.drafts) + 1)]
        return torch.stack([self._table.logits(text) for text in texts])

    def _emit(self, asked: Asked, rows: torch.Tensor) -> list[int]:
        if asked.unread:
            asked.unread -= 1
            if asked.unread:
                return []
        new: list[int] = []
        for row in rows:
            new.append(int(row.argmax()))
            if len(new) > len(asked.drafts) or new[-1] != asked.drafts[len(new) - 1]:
                break
        asked.ids += new
        asked.emitted += new
        return new

    def _is_over(self, asked: Asked) -> bool:
        return len(asked.emitted) >= asked.max_tokens or bool(STOP_IDS & set(asked.emitted))


class ToyOpener:
    """Implements rounds.Opener."""

    def __init__(self, *, is_traced: bool = False) -> None:
        self.slot: SnapshotSlot | None = None
        self.records: list[TraceRecord] = []
        self._is_traced = is_traced
        self._num_opened = 0

    def open(self, prompt_ids: np.ndarray) -> ExternalSequence:
        assert self.slot is not None
        snapshot = self.slot.current
        assert isinstance(snapshot.proposer, TreeProposer)
        drafter = next(each for each in snapshot.proposer.sources if isinstance(each, Drafter))
        ids = prompt_ids.tolist()
        prompt = map_prompt(ids, TARGET_TOKENIZER.vocabulary, DRAFT_TOKENIZER, ALIGNMENT, longest=2048)
        request = Request(tuple(ids), tuple(prompt.ids), 1, stop_ids=STOP_IDS, mode="fast")
        drafted = DraftingState(drafter, request, prompt.rest, snapshot.proposer.calibrator, with_lookup=True)
        self._num_opened += 1
        tracer = None
        if self._is_traced:
            origin = RecordContext(f"text-{self._num_opened}", "default", "w", "t", "d", snapshot.version, "a")
            tracer = TraceRecordBuilder(request, origin, RecorderSettings(segment_tokens=8), self.records.append)
        return ExternalSequence(TokenBuffer(prompt_ids), snapshot, drafted, tracer, len(ids))


def make_rounds(
    *,
    proposer: TreeProposer | None = None,
    opener: ToyOpener | None = None,
    policy: BatchPolicy | None = None,
    passes: StepTimeModel | None = None,
    metrics: CountingMetrics | None = None,
    clock: Clock | None = None,
    drafter_ids: int = 100_000,
    keep_left_s: float = 100.0,
    max_inactive: int = 50,
    failures: DraftingFailures | None = None,
) -> tuple[RoundScheduler, SnapshotSlot, SequenceTracker[ExternalSequence]]:
    """The real rounds over toys; what fails ends the test unless `failures` are counted."""
    clock = clock or Clock()
    slot = SnapshotSlot(LoadedSnapshot(None, "base", proposer or make_drafter(), None, None))
    followed: SequenceTracker[ExternalSequence] = SequenceTracker(
        keep_s=keep_left_s, max_inactive=max_inactive, clock=clock
    )
    opener = opener or ToyOpener()
    opener.slot = slot
    rounds = RoundScheduler(
        opener,
        followed,
        policy or FixedBatchPolicy(),
        passes or StepTimeModel(),
        None,
        metrics or CountingMetrics(),
        target="t",
        stop_ids=STOP_IDS,
        top_k=4,
        limits=RoundLimits(lambda: NUM_TOKENS, drafter_ids, trace_rows=64, idle_s=5.0),
        failures=failures or Strict(),
        clock=clock,
    )
    return rounds, slot, followed


def plain(table: ToyTable, asked: Asked) -> list[int]:
    """What the target says alone, as long as what was emitted."""
    ids = asked.ids[: asked.num_prompt]
    while len(ids) < len(asked.ids):
        ids.append(int(table.logits(ids).argmax()))
    return ids[asked.num_prompt :]


def prompts(num: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Different texts; some are the same."""
    chosen = random.Random(seed)
    words = ["abc ", "he.", "cd\n", "ab", "fgh ", "\u20ac "]
    return [
        PROMPT + tuple(TARGET_TOKENIZER.encode("".join(chosen.choices(words, k=chosen.randint(0, 4)))))
        for _ in range(num)
    ]
