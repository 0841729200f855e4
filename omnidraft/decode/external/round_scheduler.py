"""Rounds of an engine that is not ours: it tells what it emitted for each text it works on, and is given drafts.

It tells no ids of requests, no settings and no ends (followed.py says how texts are known all the same). A text keeps
its snapshot as long as it is followed, so that no swap makes the drafter read running texts again.
As in safe_drafting.py, no exception gets out: the engine is given nothing to score. Texts that failed together are
drafted for one by one in the next round, so that the one that is to blame is found; it gets no drafts any more.
Shapes: N rows of logits of one text, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from omnidraft.decode.drafting.safe_drafting import DraftingFailures, require_harmless
from omnidraft.decode.external.batch_drafting import Drafted, draft
from omnidraft.decode.external.batch_policy import BatchPolicy, FixedBatchPolicy
from omnidraft.decode.external.sequence import ExternalSequence, groups
from omnidraft.decode.external.sequence_tracker import SequenceTracker
from omnidraft.decode.external.step_time_model import StepTimeModel
from omnidraft.decode.logprobs import top_k_logprobs
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.step_metrics import count_step
from omnidraft.ports import DraftTree, FinishReason, Metrics, Step, Timings, TreeLimits


class Opener(Protocol):
    """Begins texts."""

    def open(self, prompt_ids: np.ndarray) -> ExternalSequence:
        """One that nobody knows yet, with the snapshot that it keeps."""


LogitsOf = Callable[[Sequence[int]], Sequence[torch.Tensor] | None]
"""How many rows each text of this round had -> the logits [N, V] of each; None where they cannot be had."""


@dataclass(frozen=True, slots=True)
class RoundLimits:
    """What a host may spend."""

    num_tokens: Callable[[], int]
    """Drafted for a text in a round, at most; asked in each."""
    drafter_ids: int
    """Ids of all texts together whose keys the drafter holds, at most."""
    trace_rows: int
    """Rows of a round whose logits are looked at for traces, at most; more are recorded without."""
    idle_s: float
    """Without a round for so long, all texts count as left."""


@dataclass(frozen=True, slots=True)
class _Given:
    """The last round."""

    texts: tuple[ExternalSequence, ...]
    num_nodes: int
    step_rows: tuple[int, ...]
    at_s: float


class RoundScheduler:
    """One thread at a time."""

    def __init__(
        self,
        opener: Opener,
        followed: SequenceTracker[ExternalSequence],
        policy: BatchPolicy,
        passes: StepTimeModel,
        step_s: CostCurve | None,
        metrics: Metrics,
        *,
        target: str,
        stop_ids: frozenset[int],
        top_k: int,
        limits: RoundLimits,
        failures: DraftingFailures,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._opener = opener
        self._followed = followed
        self._policy = policy
        self._passes = passes
        self._step_s = step_s
        self._metrics = metrics
        self._target = target
        self._stop_ids = stop_ids
        self._top_k = top_k
        self._limits = limits
        self._failures = failures
        self._clock = clock
        self._given: _Given | None = None

    def next(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray], logits_of: LogitsOf
    ) -> list[list[int]]:
        """The engine emitted these tokens for each of its texts, none where it still reads a prompt; returns as many
        lists of drafted tokens.

        Args:
            ids_of: place among the texts -> all ids of that text, those just emitted included.
        """
        try:
            return self._next(emitted, ids_of, logits_of)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._begin_anew(exc)
            return [[] for _ in emitted]

    def _next(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray], logits_of: LogitsOf
    ) -> list[list[int]]:
        came_s = self._clock()
        texts = self._found(emitted, ids_of)
        working_on = [text for text in texts if text is not None]
        pass_s = self._judge(texts, emitted, came_s)
        self._observe(texts, emitted, pass_s, logits_of)
        self._leave(self._followed.here(working_on))
        self._forget()
        drafts = self._draft(working_on)
        return [drafts.get(id(text), []) for text in texts]

    def tick(self) -> None:
        """Called every second or so: what is left is written down and in time forgotten, also when no round comes."""
        try:
            self._tick()
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._begin_anew(exc)

    def _tick(self) -> None:
        if self._given is None or self._clock() - self._given.at_s > self._limits.idle_s:
            self._given = None
            self._leave(self._followed.here(()))
        self._forget()
        self._metrics.set("omnidraft_followed_texts", len(self._followed), target=self._target)
        self._metrics.set("omnidraft_drafter_ids", self._num_held(), target=self._target)

    def close(self) -> None:
        """No more rounds come: all records are written."""
        self._given = None
        self._leave(self._followed.here(()))

    def _begin_anew(self, error: Exception) -> None:
        """Nobody knows how far the round came: all texts are forgotten, with what is not recorded of them yet, and
        those that go on are opened again."""
        self._failures.tell(error)
        self._given = None
        for text in self._followed.forget_all():
            text.drafted.release()

    def _found(
        self, emitted: Sequence[Sequence[int]], ids_of: Callable[[int], np.ndarray]
    ) -> list[ExternalSequence | None]:
        """The text at each place; None where nothing was emitted."""
        found: list[ExternalSequence | None] = []
        for place, new in enumerate(emitted):
            if not new:
                found.append(None)
                continue
            ids = ids_of(place)
            before = ids[: len(ids) - len(new)]
            text = self._followed.find(before, [each for each in found if each is not None])
            found.append(self._opened(before) if text is None else text)
        return found

    def _opened(self, prompt_ids: np.ndarray) -> ExternalSequence | None:
        """A new text; None, until the next round, where it cannot be opened."""
        try:
            text = self._opener.open(prompt_ids)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._failures.tell(exc)
            return None
        self._followed.add(text)
        return text

    def _judge(
        self, texts: Sequence[ExternalSequence | None], emitted: Sequence[Sequence[int]], came_s: float
    ) -> float:
        """What the pass since the last round says of costs and drafts; returns its seconds, 0 where they say nothing:
        when it also read prompts, or when the engine waited."""
        given, self._given = self._given, None
        if given is None or {id(text) for text in texts} != {id(text) for text in given.texts}:
            return 0.0
        pass_s = came_s - given.at_s
        self._passes.update(len(given.texts) + given.num_nodes, pass_s)
        self._policy.update(sum(map(len, emitted)), given.num_nodes, given.step_rows)
        return pass_s

    def _observe(
        self,
        texts: Sequence[ExternalSequence | None],
        emitted: Sequence[Sequence[int]],
        pass_s: float,
        logits_of: LogitsOf,
    ) -> None:
        num_rows = [1 if text is None else len(text.tree) for text in texts]
        is_traced = any(text is not None and text.tracer is not None for text in texts)
        has_room = sum(num_rows) <= self._limits.trace_rows
        logits = logits_of(num_rows) if is_traced and has_room else None
        for place, (text, new) in enumerate(zip(texts, emitted, strict=True)):
            if text is None:
                continue
            step = self._step(text, new, pass_s, None if logits is None else logits[place])
            count_step(self._metrics, step, self._target, str(text.snapshot.version))
            if text.tracer is not None:
                text.tracer.take(step)
                if new[-1] in self._stop_ids:  # most likely over: the engine may not come back to say so
                    text.tracer.end(FinishReason.STOP)
            if not text.is_given_up:
                self._drafter_observes(text, new)
            self._followed.append(text, new)

    def _drafter_observes(self, text: ExternalSequence, new: Sequence[int]) -> None:
        try:
            text.drafted.observe(new)
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._failed([text], exc)

    def _step(self, text: ExternalSequence, new: Sequence[int], pass_s: float, logits_NV: torch.Tensor | None) -> Step:
        path, node = [], 0
        for token in new:
            child = text.tree.child(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        beliefs = None
        if text.tracer is not None and logits_NV is not None and len(new) <= len(logits_NV):
            beliefs = top_k_logprobs(logits_NV.float(), range(len(new)), new, self._top_k)
        timings = Timings(text.draft_s, pass_s)
        return Step(text.tree, tuple(new), tuple(path), "", None, timings, beliefs)

    def _leave(self, left: Sequence[ExternalSequence]) -> None:
        for text in left:
            text.tree = DraftTree.empty(text.drafted.root)
            is_over = int(text.tokens.ids[-1]) in self._stop_ids
            if text.tracer is not None:
                text.tracer.end(FinishReason.STOP if is_over else None)
            if is_over:
                self._end(text)
                self._followed.forget(text)

    def _forget(self) -> None:
        for text in self._followed.forgotten():
            self._end(text)

    def _end(self, text: ExternalSequence) -> None:
        text.drafted.release()
        self._policy.finish(len(text.tokens) - text.num_prompt)

    def _draft(self, working_on: Sequence[ExternalSequence]) -> dict[int, list[int]]:
        """Drafted tokens by the identity of a text."""
        if not working_on:
            return {}
        policy, num_tokens = self._policy, self._limits.num_tokens()
        policy.start(len(working_on))
        untried = self._passes.untried(len(working_on), num_tokens)
        if untried is not None:
            policy, num_tokens = FixedBatchPolicy(), untried
        num_nodes, step_rows = 0, []
        for group in groups(working_on):
            drafted = self._of_group(group, num_tokens, policy)
            num_nodes += sum(len(tree) - 1 for tree in drafted.trees)
            step_rows += drafted.step_rows
        self._given = _Given(tuple(working_on), num_nodes, tuple(step_rows), self._clock())
        return {id(text): list(text.tree.tokens[1:]) for text in working_on}

    def _of_group(self, group: Sequence[ExternalSequence], num_tokens: int, policy: BatchPolicy) -> Drafted:
        try:
            drafted = draft([text.drafted for text in group], num_tokens, policy, self._step_s, may_open=self._has_room)
            for text, tree in zip(group, drafted.trees, strict=True):
                size = len(text.drafted.drafter.target_vocabulary)
                require_harmless(tree, text.drafted.root, TreeLimits(num_tokens, num_chains=1), size)
                text.tree, text.draft_s, text.is_suspect = tree, drafted.draft_s, False
        except Exception as exc:  # the boundary: see safe_drafting.py
            self._failed(group, exc)
            return Drafted()
        return drafted

    def _failed(self, group: Sequence[ExternalSequence], error: Exception) -> None:
        """Nobody knows what the drafter's keys of these texts hold now."""
        self._failures.tell(error)
        for text in group:
            text.failed(is_alone=len(group) == 1)

    def _has_room(self, num_ids: int) -> bool:
        """Whether the drafter may hold the keys of so many more; texts that were left give up theirs first."""
        held = self._num_held()
        for text in self._followed.left:
            if held + num_ids <= self._limits.drafter_ids:
                break
            held -= len(text.drafted.fed)
            text.drafted.release()
        return held + num_ids <= self._limits.drafter_ids

    def _num_held(self) -> int:
        return sum(len(text.drafted.fed) for text in self._followed)
