"""Decodes many sequences against one target, in rounds.

A round: draft for all running sequences, one pass of the target over their trees and over a chunk of the prompts that
are being read, then every sequence draws its own path. Plain decoding has empty trees.
"""

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from omnidraft import throttle
from omnidraft.config import SchedulerSettings
from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeSession, propose_all
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.round import PassResult, run_pass
from omnidraft.decode.sampling.grammar import Grammars, Matcher
from omnidraft.decode.sampling.logits_pipeline import LogitsPipeline
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.decode.sampling.thought_gate import constraint_of
from omnidraft.decode.scheduler import ScheduledRound, Scheduler
from omnidraft.decode.sequence import SequenceState
from omnidraft.decode.stop_checker import StopChecker
from omnidraft.ports import (
    DraftTree,
    Mode,
    Noise,
    OtherTexts,
    Proposer,
    Request,
    Step,
    Target,
    rotation_offset,
)
from omnidraft.vocab.tokenizer import Vocabulary

_MAX_BESIDE_PROMPTS = 32
"""Rounds in a row that read prompts beside running sequences, where passes are measured: theirs are on no cost curve,
and none of them is a plain pass."""


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """The result of one round for a sequence: a step, or the error that ended it."""

    sequence: SequenceState
    step: Step | None = None
    error: Exception | None = None


class Decoder:
    """Decodes sequences in rounds. One thread at a time."""

    def __init__(
        self,
        target: Target,
        vocabulary: Vocabulary,
        *,
        trace_top_k: int | None = None,
        costs: MeasuredCosts | None = None,
        noise: Callable[[int, int, int], Noise] = SeededNoise,
        failures: DraftingFailures | None = None,
        grammars: Grammars | None = None,
        scheduling: SchedulerSettings | None = None,
    ) -> None:
        """Decode with this target and its vocabulary.

        Args:
            trace_top_k: log-probabilities to keep per emitted token; None keeps none.
            costs: updated with the duration of each pass; None measures nothing.
            noise: (seed, choice, size of the target's vocabulary) -> the noise of one text.
            failures: counts and logs drafting failures, which end no text; None logs only.
            grammars: compiles the grammars of requests; None compiles them without a trial, for trusted requests.
            scheduling: limits of the rounds; None takes the defaults.
        """
        self.target = target
        self._vocabulary = vocabulary
        self.grammars = grammars or Grammars(vocabulary)
        self._trace_top_k = trace_top_k
        self.costs = costs
        self._noise = noise
        self.failures = failures or DraftingFailures()
        self.scheduler = Scheduler(target, scheduling or SchedulerSettings())
        self._num_beside_prompts = 0
        """Rounds since the last one whose pass could be measured."""

    def plain_token_s(self, mode: Mode) -> float | None:
        """Return the seconds that a token without drafts takes now, beside the other sequences; None where the mode was
        not measured."""
        num_running = max(self.scheduler.num_admitted, 1)
        pass_s = self._pass_s(mode)
        return None if pass_s is None else pass_s(num_running) / num_running

    def scoring_rows(self, mode: Mode) -> int:
        """Return the number of prompt ids that a pass scores before the next round."""
        return self.scheduler.scoring_rows(mode, self._pass_s(mode))

    def with_target(self, target: Target, *, max_num_seqs: int = 1) -> "Decoder":
        """Return the same decoder over another view of its target, whose passes do not update the measured costs."""
        other = copy.copy(self)
        other.target, other.costs = target, None
        other.scheduler = Scheduler(target, SchedulerSettings(max_num_seqs=max_num_seqs))
        return other

    def decode(self, request: Request, proposer: Proposer | None) -> Iterator[Step]:
        """Decode one text alone: yield one Step per pass of the target, until the text ends. The caller keeps one
        proposer to the last token.

        Raises:
            RequestError: before the first step, when the target cannot take the prompt or the grammar does not compile;
                later, when no token can follow under the grammar.
        """
        alone = self.alone()
        yield from alone.steps(alone.add(request, proposer))

    def alone(self) -> "Decoder":
        """Return the same decoder without its sequences."""
        other = copy.copy(self)
        other.scheduler = Scheduler(self.target, SchedulerSettings())
        return other

    def steps(self, sequence: SequenceState) -> Iterator[Step]:
        """Yield the steps of the only sequence; raise what ended it."""
        try:
            while not sequence.is_finished:
                for output in self.step():
                    if output.error is not None:
                        raise output.error
                    assert output.step is not None
                    yield output.step
        finally:
            self.close()

    def add(
        self, request: Request, proposer: Proposer | None, *, client: str = "", cache_scope: str | None = None
    ) -> SequenceState:
        """Add a text, which takes part in the next rounds. The caller keeps one proposer to its last token.

        Args:
            client: sequences are admitted fairly over clients.
            cache_scope: texts of one scope may reuse each other's keys; None reuses nothing.

        Raises:
            RequestError: the grammar does not compile.
        """
        sampling = self.grammars.prepared(request.sampling, client=client, cache_scope=cache_scope)
        request = replace(request, sampling=sampling)
        sequence = SequenceState(
            request,
            self._noise(request.seed, request.choice, self.target.vocab_size),
            LogitsPipeline(request, self.matcher(request)),
            StopChecker(request, self._vocabulary),
            client,
            cache_scope,
        )
        return self.add_sequence(sequence, proposer)

    def matcher(self, request: Request) -> Matcher | None:
        """Return what keeps the text to its grammar and its thoughts to their budget. Raises RequestError."""
        grammar = request.sampling.grammar
        if grammar is not None:
            return self.grammars.matcher(grammar, request.stop_ids, request.thoughts)
        constraint = constraint_of(None, request.thoughts)
        return None if constraint is None else Matcher(constraint, request.stop_ids)

    def add_sequence(self, sequence: SequenceState, proposer: Proposer | None) -> SequenceState:
        """Add a text whose own parts draw and end it; of its request's settings, drafts know alone. Return it."""
        request, scope = sequence.request, sequence.cache_scope
        if proposer is not None and request.num_draft_tokens:
            sequence.draft = self._safe_session(proposer, request)
        if scope is not None and rotation_offset(self.target, len(request.prompt_ids) + request.max_new_tokens):
            sequence.cache_scope = scope + "\0long"  # whose keys are of no use to other texts
        self.scheduler.add(sequence)
        return sequence

    def move(self, sequence: SequenceState, proposer: Proposer) -> None:
        """Draft for a running sequence with another snapshot's proposer from now on; its text does not change."""
        if sequence.draft is not None:
            sequence.draft.close()
            sequence.draft = self._safe_session(proposer, sequence.request)
            emitted = sequence.ids[len(sequence.request.prompt_ids) :]
            if emitted:
                sequence.draft.observe(emitted)

    def _safe_session(self, proposer: Proposer, request: Request) -> SafeSession:
        return SafeSession(proposer, request, self.target.vocab_size, self.failures)

    def abort(self, sequence: SequenceState, *, keeps_keys: bool = False) -> None:
        """End a sequence, and free its keys or leave them to others; nothing happens when it has ended already."""
        if sequence in self.scheduler.sequences:
            self.scheduler.remove(sequence, keeps_keys=keeps_keys)

    def close(self) -> None:
        """End all sequences and free all keys."""
        for sequence in self.scheduler.sequences:
            self.scheduler.remove(sequence)
        self.scheduler.prefixes.clear()

    def step(self) -> list[SequenceOutput]:
        """Run one round; return the steps of the sequences that drew tokens, and the errors of those that failed. Their
        observers have been told."""
        throttle.note_round()
        started_s = time.perf_counter()
        scheduled = self._schedule()
        drafts = self._draft(scheduled)
        replays = [(sequence, sequence.replay(num_ids)) for sequence, num_ids in scheduled.replays]
        result = run_pass(self.target, [*replays, *drafts], scheduled.prompts)
        for sequence, tree in replays:
            if sequence in result.logits:
                try:
                    sequence.open_session.keep(range(len(tree)))
                except Exception as exc:  # one text's failure must not end the others
                    result.errors[sequence] = exc
        steps = self._draw_all(drafts, result)
        errors = {**dict(scheduled.failed), **result.errors}
        self._update_costs(scheduled, drafts, result)
        drawn, round_s = [each.step for each in steps if each.step is not None], time.perf_counter() - started_s
        _share_time(drawn, scheduled.num_other_rows, result.seconds, round_s)
        outputs = [*(SequenceOutput(sequence, error=error) for sequence, error in errors.items()), *steps]
        for output in outputs:
            if output.step is not None:
                output.sequence.take(output.step)
            if output.error is not None or output.sequence.is_finished:
                output.sequence.end(output.error)
                self.abort(output.sequence)
        return outputs

    def _schedule(self) -> ScheduledRound:
        """Return the next round. After many in a row that read prompts beside running sequences one reads none, so that
        a pass is measured."""
        scheduled = self.scheduler.schedule(self._pass_s)
        is_beside = self.costs is not None and bool(scheduled.running and scheduled.num_other_rows)
        if is_beside and self._num_beside_prompts >= _MAX_BESIDE_PROMPTS:
            scheduled = replace(scheduled, prompts=[], replays=[])
        self._num_beside_prompts = self._num_beside_prompts + 1 if is_beside and scheduled.num_other_rows else 0
        return scheduled

    def _draft(self, scheduled: ScheduledRound) -> list[tuple[SequenceState, DraftTree]]:
        """Return the tree of every running sequence."""
        running = scheduled.running
        requests = {sequence: each for sequence in running if (each := sequence.draft_request(self.target))}
        num_prompts = self.scheduler.num_admitted - len(running)
        others = OtherTexts(len(running) - len(requests), num_prompts, scheduled.num_other_rows)
        trees = dict(zip(requests, propose_all(list(requests.values()), others), strict=True))
        return [(sequence, trees.get(sequence) or DraftTree.empty(sequence.ids[-1])) for sequence in running]

    def _draw_all(self, drafts: Sequence[tuple[SequenceState, DraftTree]], result: PassResult) -> list[SequenceOutput]:
        """Let every text draw its path; show all paths to the drafts' proposers afterwards."""
        outputs = []
        for sequence, tree in drafts:
            if sequence in result.logits:
                try:
                    step = sequence.draw(tree, result.logits[sequence], self._trace_top_k)
                    outputs.append(SequenceOutput(sequence, step))
                except Exception as exc:  # one text's failure must not end the others
                    outputs.append(SequenceOutput(sequence, error=exc))
        for each in outputs:
            if each.step is not None and each.sequence.draft is not None:
                each.sequence.draft.observe(each.step.emitted)
        return outputs

    def _update_costs(
        self, scheduled: ScheduledRound, drafts: Sequence[tuple[SequenceState, DraftTree]], result: PassResult
    ) -> None:
        """Add the duration of the pass, if it computed trees and nothing else, as the passes of one cost curve do."""
        if self.costs is None or result.has_failed or scheduled.num_other_rows:
            return
        curves = {self.target.limits(sequence.request.mode) for sequence, _ in drafts}
        if len(curves) == 1:
            self.costs.update_pass(drafts[0][0].request.mode, sum(len(tree) for _, tree in drafts), result.seconds)

    def _pass_s(self, mode: Mode) -> Callable[[int], float] | None:
        return None if self.costs is None else self.costs.measured(mode)


def _share_time(steps: Sequence[Step], num_other_rows: int, target_s: float, round_s: float) -> None:
    """Give the step of every text its share of the round, by its rows; the share of prompts belongs to no step."""
    num_rows = sum(len(step.tree) for step in steps) + num_other_rows
    other_s = max(round_s - target_s - sum(step.tree.draft_s for step in steps), 0.0)
    for step in steps:
        spent, share = step.timings, len(step.tree) / num_rows
        spent.draft_s, spent.target_s, spent.other_s = step.tree.draft_s, share * target_s, share * other_s
