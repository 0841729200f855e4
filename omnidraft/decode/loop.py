"""The decoding loop: propose a tree, score it, draw the target's path, keep it; plain decoding has empty trees."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeDrafting, SafeRequest, SafeText
from omnidraft.decode.logprobs import client_logprobs, top_k_logprobs
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.logits_pipeline import LogitsPipeline
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.decode.stop_checker import StopChecker
from omnidraft.decode.verification import draw_path
from omnidraft.ports import (
    DraftTree,
    Mode,
    Noise,
    Proposer,
    Request,
    Step,
    Target,
    TargetSession,
    Timings,
    TreeLimits,
)
from omnidraft.vocab.tokenizer import Vocabulary


class Decoder:
    """Decodes requests against one target."""

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
    ) -> None:
        """Decode with this target and its vocabulary.

        Args:
            trace_top_k: log-probabilities to keep per emitted token; None keeps none.
            costs: updated with the duration of each pass; None measures nothing.
            noise: (seed, choice, size of the target's vocabulary) -> the noise of one text.
            failures: counts and logs drafting failures, which end no text; None logs only.
            grammars: compiles the grammars of requests; None compiles them without a trial, for trusted requests.
        """
        self.target = target
        self._vocabulary = vocabulary
        self.grammars = grammars or Grammars(vocabulary)
        self._trace_top_k = trace_top_k
        self._costs = costs
        self._noise = noise
        self.failures = failures or DraftingFailures()
        self._drafting = SafeDrafting(target.vocab_size, self.failures)

    def plain_pass_s(self, mode: Mode) -> float | None:
        """Return the seconds that a pass without a draft takes now; None where the mode was not measured."""
        return self._costs.plain_pass_s(mode) if self._costs else None

    def with_target(self, target: Target) -> "Decoder":
        """Return the same decoder over another view of its target, whose passes do not update the measured costs."""
        other = copy.copy(self)
        other.target, other._costs = target, None
        return other

    def decode(self, request: Request, proposer: Proposer | None) -> Iterator[Step]:
        """Yield one Step per pass of the target, until the text ends. The caller keeps one proposer to the last token.

        Raises:
            RequestError: before the first step, when the target cannot take the prompt or the grammar does not compile;
                later, when no token can follow under the grammar.
        """
        grammar = request.sampling.grammar
        matcher = None if grammar is None else self.grammars.matcher(grammar, request.stop_ids)
        pipeline = LogitsPipeline(request, matcher)
        session = self.target.open(request.prompt_ids, request.max_new_tokens, request.mode)
        drafting = None
        if proposer is not None and request.num_draft_tokens:
            drafting = self._drafting.open(proposer, request)
        try:
            yield from self._steps(request, session, drafting, pipeline)
        finally:
            session.close()
            if drafting is not None:
                self._drafting.close(drafting)

    def _steps(
        self, request: Request, session: TargetSession, drafting: SafeText | None, pipeline: LogitsPipeline
    ) -> Iterator[Step]:
        noise = self._noise(request.seed, request.choice, self.target.vocab_size)
        stop_checker = StopChecker(request, self._vocabulary)
        root, position = request.prompt_ids[-1], len(request.prompt_ids)
        num_left = request.max_new_tokens
        while stop_checker.finish_reason is None:
            started = time.perf_counter()
            tree = DraftTree.empty(root)
            if drafting is not None:
                limits = self._limits(request, num_left)
                (tree,) = self._drafting.propose_all([SafeRequest(drafting, position, limits, noise)])
            step, target_s = self._step(session, tree, position, noise, pipeline, stop_checker, request.num_log_probs)
            if self._costs is not None:
                self._costs.update_pass(request.mode, len(tree), target_s)
            if drafting is not None:
                self._drafting.observe_all([(drafting, step.emitted)])
            root, position = step.emitted[-1], position + len(step.emitted)
            num_left -= len(step.emitted)
            elapsed_s = time.perf_counter() - started
            timings = Timings(tree.draft_s, target_s, elapsed_s - target_s - tree.draft_s)
            yield replace(step, timings=timings)

    def _limits(self, request: Request, num_left: int) -> TreeLimits:
        """Return the target's limits; nothing is drafted beyond `max_new_tokens`, where its KV cache ends."""
        limits = self.target.limits(request.mode)
        num_nodes = min(limits.num_nodes, request.num_draft_tokens, num_left - 1)
        return replace(limits, num_nodes=num_nodes)

    def _step(
        self,
        session: TargetSession,
        tree: DraftTree,
        position: int,
        noise: Noise,
        pipeline: LogitsPipeline,
        stop_checker: StopChecker,
        num_log_probs: int | None,
    ) -> tuple[Step, float]:
        """Score the tree and let the target draw its path; return the step and the seconds of the target's pass."""
        started = time.perf_counter()
        logits_NV = session.score(tree)
        target_s = time.perf_counter() - started
        rows_NV = logits_NV.float().cpu().numpy()

        def draw(node: int, index: int) -> int:
            token = noise.draw(*pipeline.distribution(rows_NV[node]), position + index)
            pipeline.take(token)
            return token

        path = draw_path(tree, draw, stop_checker.ends)
        text, finish_reason = stop_checker.take(), stop_checker.finish_reason
        nodes, top_k, num = (0, *path.nodes)[: len(path.emitted)], self._trace_top_k, num_log_probs
        if finish_reason is None:
            session.keep(nodes)
        traced = None if top_k is None else top_k_logprobs(logits_NV, nodes, path.emitted, top_k)
        for_client = None if num is None else client_logprobs(logits_NV, nodes, path.emitted, num)
        return Step(tree, path.emitted, path.nodes, text, finish_reason, Timings(), traced, for_client), target_s
