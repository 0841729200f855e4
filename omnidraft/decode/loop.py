"""The decoding loop: propose, score, draw, keep. Plain decoding is the same loop with empty trees."""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from omnidraft.decode.drafting.safe_drafting import DraftingFailures, SafeDrafting
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
    ProposerSession,
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
        """
        Args:
            trace_top_k: log-probabilities to keep per emitted token; None keeps none.
            costs: told what each pass took; None when nobody wants to know.
            noise: (seed, choice, size of the target's vocabulary) -> the noise of one text.
            failures: told when drafting fails, which ends no text; None logs only.
            grammars: None trusts the grammars that requests bring.
        """
        self.target = target
        self._vocabulary = vocabulary
        self.grammars = grammars or Grammars(vocabulary)
        self._trace_top_k = trace_top_k
        self._costs = costs
        self._noise = noise
        self.failures = failures or DraftingFailures()

    def plain_pass_s(self, mode: Mode) -> float | None:
        """What a pass without a draft takes now; None where nobody measured it."""
        return self._costs.plain_pass_s(mode) if self._costs else None

    def over(self, target: Target) -> "Decoder":
        """The same decoder over another view of its target, whose passes tell nothing about the target's costs."""
        other = copy.copy(self)
        other.target, other._costs = target, None
        return other

    def decode(self, request: Request, proposer: Proposer | None) -> Iterator[Step]:
        """One Step per pass of the target, until the text ends. The caller keeps one proposer to the last token.

        Raises:
            RequestError: before the first step, when the target cannot take the prompt or the grammar is none; later,
                when no token can follow under the grammar.
        """
        grammar = request.sampling.grammar
        shaper = LogitsPipeline(request, None if grammar is None else self.grammars.matcher(grammar, request.stop_ids))
        session = self.target.open(request.prompt_ids, request.max_new_tokens, request.mode)
        drafting = None
        if proposer is not None and request.num_draft_tokens:
            drafting = SafeDrafting(proposer, request, self.target.vocab_size, self.failures)
        try:
            yield from self._steps(request, session, drafting, shaper)
        finally:
            session.close()

    def _steps(
        self, request: Request, session: TargetSession, drafting: ProposerSession | None, shaper: LogitsPipeline
    ) -> Iterator[Step]:
        noise = self._noise(request.seed, request.choice, self.target.vocab_size)
        watch = StopChecker(request, self._vocabulary)
        root, position = request.prompt_ids[-1], len(request.prompt_ids)
        num_left = request.max_new_tokens
        while watch.finish_reason is None:
            started = time.perf_counter()
            tree = DraftTree.empty(root)
            if drafting is not None:
                limits = self._limits(request, num_left)
                tree = drafting.propose(position, limits, noise)
            step, target_s = self._step(session, tree, position, noise, shaper, watch, request.num_log_probs)
            if self._costs is not None:
                self._costs.update_pass(request.mode, len(tree), target_s)
            if drafting is not None:
                drafting.observe(step.emitted)
            root, position = step.emitted[-1], position + len(step.emitted)
            num_left -= len(step.emitted)
            spent = time.perf_counter() - started
            timings = Timings(tree.draft_s, target_s, spent - target_s - tree.draft_s)
            yield replace(step, timings=timings)

    def _limits(self, request: Request, num_left: int) -> TreeLimits:
        """The target's own; its memory ends with the answer."""
        limits = self.target.limits(request.mode)
        num_nodes = min(limits.num_nodes, request.num_draft_tokens, num_left - 1)
        return replace(limits, num_nodes=num_nodes)

    def _step(
        self,
        session: TargetSession,
        tree: DraftTree,
        position: int,
        noise: Noise,
        shaper: LogitsPipeline,
        watch: StopChecker,
        num_log_probs: int | None,
    ) -> tuple[Step, float]:
        """Score the tree and let the target draw its path; returns the seconds of the target's pass too."""
        started = time.perf_counter()
        logits_NV = session.score(tree)
        target_s = time.perf_counter() - started
        rows_NV = logits_NV.float().cpu().numpy()

        def draw(node: int, index: int) -> int:
            token = noise.draw(*shaper.shape(rows_NV[node]), position + index)
            shaper.take(token)
            return token

        path = draw_path(tree, draw, watch.ends)
        drawn_from = (0, *path.nodes)[: len(path.emitted)]
        if watch.finish_reason is None:
            session.keep(drawn_from)
        beliefs = None
        if self._trace_top_k is not None:
            beliefs = top_k_logprobs(logits_NV, drawn_from, path.emitted, self._trace_top_k)
        told = None if num_log_probs is None else client_logprobs(logits_NV, drawn_from, path.emitted, num_log_probs)
        step = Step(tree, path.emitted, path.nodes, watch.take(), watch.finish_reason, Timings(), beliefs, told)
        return step, target_s
