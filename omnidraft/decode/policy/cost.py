"""The policy that drafts the trees with the most tokens per second, by the measured costs of passes and drafter steps.

The rows of all texts of a round share one pass and the drafter's steps, so their prefixes and nodes compete. Tokens and
seconds are summed over rounds; their ratio is the rate that every further node or step must beat with what it adds to
both (Dinkelbach's method for ratios: https://doi.org/10.1287/mnsc.13.7.492; docs/algorithms.md section 10). It is a
multiple of plain decoding's rate, which changes with the number of texts. Rows of prompts in the same pass make further
rows dearer, and their own time is not the drafts'. Whether a text is read for the drafter depends on the gain under the
load when these prompts' texts decode too. When the drafter does not pay it stops, and is tried again now and then for a
small share of the time, as if costs were the least that they may be. Now and then nothing is drafted, to measure a
plain pass. A text that the drafter has not read is read only when the rest of the answer should pay for it, or its end.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.policy.gains import (
    EMA_WEIGHT,
    MAX_STREAMS,
    MIN_GAIN,
    TRIAL_ROUNDS,
    AnswerLength,
    DraftingStats,
    PlainRounds,
    SearchGains,
    SpentText,
    StreamStats,
    load_of,
    stream_of,
)
from omnidraft.decode.policy.saved_tokens import saved_share
from omnidraft.ports import NO_OTHERS, OtherTexts, RoundText, TextOutcome, Work

CATCH_UP = 4
"""Ids that an active drafter reads at most before its next step; more count as catching up."""
_PRIOR_AGREEMENT, _PRIOR_DEPTH = 0.65, 4
_FIRST_GAIN = 0.2
"""Tokens per text and round that the drafter is expected to gain at most before any was measured."""
_WHOLE_GAIN = 0.25
"""Tokens per round that a drafter is taken to gain by reading the whole of a long text, beyond its end."""
_MANY_ROWS = 1024
"""Rows that cost more than one does, unless all passes are padded to one size."""
_PRIOR_ROUNDS = 10
"""Plain rounds that count beside those that were measured, so that one lucky round sets no rate to beat."""


class CostPolicy:
    """Implements ports.Policy for one target and mode. Every tenant has its own gain and trials for each kind of
    request, so that losses with one kind do not end the gains of another; and for each load, a power of two of texts
    that share the target, since rows that were free for one text are dear when many have them. A new tenant begins with
    what was measured over all."""

    def __init__(self, pass_s: CostCurve, step_s: CostCurve, num_candidates: int = 4) -> None:
        """Take the seconds of a pass and of a drafter step by their rows."""
        self.pass_s, self.step_s, self.num_candidates = pass_s, step_s, num_candidates
        self.next_value = 0.5
        """Share of a prefix's probability that its best child has: the tokens that one more drafter step gives."""
        self.streams = StreamStats(self.first_gain)
        self.length: Callable[[str | None, Work], AnswerLength] = lru_cache(MAX_STREAMS)(self._new_length)
        """How long this tenant's answers of this kind are, None: those of all."""
        self._plain_rounds = PlainRounds()
        self.searches = SearchGains(pass_s)
        self.num_without = Counter[int]()
        """Nodes that the last round would have scored without the drafter, by load."""

    def start_round(self, texts: Sequence[RoundText], others: OtherTexts = NO_OTHERS) -> "CostPlan":
        """See ports.Policy."""
        is_padded = self.pass_s(1) == self.pass_s(_MANY_ROWS)  # then each pass measures a plain one
        is_plain = not others.num_prompt_rows and not is_padded and self._plain_rounds.is_due(load_of(len(texts)))
        return CostPlan(self, texts, others, is_plain=is_plain)

    def update(self, outcomes: Sequence[TextOutcome], others: OtherTexts = NO_OTHERS) -> None:
        """See ports.Policy. Seconds are those of the cost curves, which are smoother than the clock's; catching up was
        paid for when the ids were read."""
        num_texts, load = len(outcomes) + others.num_texts, load_of(len(outcomes))
        is_drafted = any(each.num_nodes for each in outcomes)
        self._plain_rounds.add(load, is_drafted=is_drafted, is_measured=not others.num_prompt_rows)
        self.num_without[load] = sum(each.num_nodes_without for each in outcomes)
        num_nodes, num_plain = sum(each.num_nodes for each in outcomes), len(outcomes) + others.num_rows
        self.searches.update(outcomes, num_texts, self._node_s(num_plain, num_nodes))
        token_s, texts = self.pass_s(num_texts) / num_texts, self._spent(outcomes, others)
        for stream in dict.fromkeys(stream_of(outcome) for outcome in outcomes):
            own = [each for each in texts if stream_of(each.outcome) == stream]
            self.streams.of(*stream, num_texts).add(own, token_s)
            self.streams.payer(*stream, num_texts).add_idle(own)
        for work in dict.fromkeys(outcome.work for outcome in outcomes):
            of_work = [each for each in texts if each.outcome.work == work]
            self.streams.of(None, work, num_texts).add(of_work, token_s)

    def finish(self, tenant: str, num_emitted: int, work: Work = "text") -> None:
        """See ports.Policy."""
        if num_emitted:
            for each in (tenant, None):
                self.length(each, work).add(num_emitted)

    def _spent(self, outcomes: Sequence[TextOutcome], others: OtherTexts) -> list[SpentText]:
        """Return the seconds of each text: its share of a plain pass, and of nodes and steps by their number. A text
        that is tried alone pays as if all were drafted for: else no trial beside many texts could show a gain."""
        num_texts, num_plain = len(outcomes) + others.num_texts, len(outcomes) + others.num_rows
        plain_s = self.pass_s(num_texts) / num_texts
        is_tried = [self.streams.of(*stream_of(each), num_texts).trials_left > 0 for each in outcomes]
        least = [len(outcomes) * each for each in is_tried]
        num_nodes = sum(each.num_nodes for each in outcomes)
        without_s = self._node_s(num_plain, sum(each.num_nodes_without for each in outcomes))
        seconds = [
            plain_s + self._node_s(num_plain, max(num_nodes, fewest)) * each.num_nodes
            for each, fewest in zip(outcomes, least, strict=True)
        ]
        for rows in zip(*(outcome.step_rows for outcome in outcomes), strict=True):
            capped = [min(each, CATCH_UP) for each in rows]
            totals = [max(sum(capped), fewest, 1) for fewest in least]
            parts = [self.step_s(total) / total * each for total, each in zip(totals, capped, strict=True)]
            seconds = [spent + part for spent, part in zip(seconds, parts, strict=True)]
        without = [
            plain_s + without_s * each.num_nodes_without if each.has_drafter else spent
            for each, spent in zip(outcomes, seconds, strict=True)
        ]
        return [SpentText(*each) for each in zip(outcomes, seconds, without, strict=True)]

    def _node_s(self, num_plain: int, num_nodes: int) -> float:
        """Return the average seconds of so many drafted nodes beside other rows."""
        return (self.pass_s(num_plain + num_nodes) - self.pass_s(num_plain)) / max(num_nodes, 1)

    def _new_length(self, tenant: str | None, work: Work) -> AnswerLength:
        return AnswerLength() if tenant is None else AnswerLength(self.length(None, work).mean)

    def first_gain(self, num_texts: int) -> float:
        """Return the gain that is expected before any was measured: that of the best chains at the prior agreement of a
        useful drafter, for each of so many texts, within bounds."""
        best, tokens, plain_s = -1.0, 0.0, self.pass_s(num_texts)
        for depth in range(1, _PRIOR_DEPTH + 1):
            tokens += _PRIOR_AGREEMENT**depth
            spent_s = self.pass_s(num_texts * (1 + depth)) - plain_s + depth * self.step_s(num_texts)
            best = max(best, tokens - spent_s / plain_s)
        return min(_FIRST_GAIN, max(MIN_GAIN, best))


class CostPlan:
    """Implements ports.RoundPlan."""

    uses_acceptance_head = False

    def __init__(
        self, policy: CostPolicy, texts: Sequence[RoundText], others: OtherTexts, *, is_plain: bool = False
    ) -> None:
        """With `is_plain` nothing is drafted."""
        self.num_candidates = policy.num_candidates
        self._is_plain = is_plain
        self._policy = policy
        self._texts = texts
        self._num_sharing = len(texts) + others.num_texts
        self._num_later = self._num_sharing + others.num_prompts
        """Texts that share the target when the prompts have been read."""
        self._num_plain = len(texts) + others.num_rows
        self._plain_s = policy.pass_s(self._num_plain)
        self._last_value: float | None = None
        self._has_trial = self._has_gain = False
        self._first_tried: dict[tuple[str, Work], int] = {}

    @cached_property
    def rate(self) -> float:
        """Tokens per second that further drafting must beat; at least that of plain decoding."""
        stats = [self._stats(*stream) for stream in {stream_of(text) for text in self._texts}]
        prior_s = _PRIOR_ROUNDS * self._policy.pass_s(self._num_sharing)
        speedup = (prior_s + sum(each.plain_s for each in stats)) / (prior_s + sum(each.seconds for each in stats))
        return max(speedup, 1.0) / self._token_s(self._num_sharing)

    @cached_property
    def _saved_share(self) -> Callable[[float], float]:
        return saved_share(self.rate, self._policy.pass_s, len(self._texts), self._num_sharing)

    def should_search(self, index: int) -> bool:
        """See ports.RoundPlan."""
        return self._policy.searches.should_search(index, self._texts, self._num_sharing)

    def should_draft(self, index: int, num_ids: int) -> bool:
        """See ports.RoundPlan."""
        if self._is_plain:
            return False
        if self._gain_pays(index, num_ids):
            self._has_gain = True
            return True
        is_tried = self._is_tried(index, num_ids)
        self._has_trial |= is_tried
        return is_tried

    def should_read(self, index: int, num_ids: int, num_last: int) -> bool:
        """See ports.RoundPlan. A trial reads the end."""
        more_s = self._policy.step_s(num_ids) - self._policy.step_s(num_last)
        return self._gain_pays(index, num_ids) and _WHOLE_GAIN * self._left_s(index, self._num_later) > more_s

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.RoundPlan. A trial drafts what would pay if costs were the least that they may be."""
        is_first = self._update_next_value(values[0])
        num_paying = self._num_paying(values, num_nodes, is_trial=self._must_try)
        return max(num_paying, int(is_first and self._must_try))

    def prune(self, values: Sequence[float], acceptances: Sequence[float] | None = None) -> int:
        """See ports.RoundPlan."""
        if self._is_plain:
            return 0
        if acceptances is not None:
            values = [value * self._saved_share(each) for value, each in zip(values, acceptances, strict=True)]
        is_trial = self._must_try and self._last_value is not None
        num_worth = self._num_worth(
            values, lambda num_nodes: self._pass_s(self._num_plain + num_nodes, is_trial) - self._plain_s
        )
        return max(num_worth, int(is_trial and len(values) > 0))

    def _num_paying(self, values: Sequence[float], num_nodes: int, *, is_trial: bool) -> int:
        """Return how many of these nodes a step extends for the most tokens per second. A step over several rows costs
        little more than one over a single row. A row of the pass costs what it does on average when every text has one
        more."""
        scored = self._num_plain + num_nodes
        more_s = max(self._pass_s(scored + len(self._texts), is_trial) - self._pass_s(scored, is_trial), 0.0)
        step_s, node_s = self._policy.step_s.least if is_trial else self._policy.step_s, more_s / len(self._texts)
        next_values = [value * self._policy.next_value for value in values]
        return self._num_worth(next_values, lambda rows: step_s(rows) + rows * node_s)

    def _num_worth(self, values: Sequence[float], cost_s: Callable[[int], float]) -> int:
        """Return how many of the first of these tokens are worth the most beyond what their seconds give otherwise."""
        best, gain, tokens, rate = 0, 0.0, 0.0, self.rate
        for number, value in enumerate(values, 1):
            tokens += value
            earned = tokens - rate * cost_s(number)
            if earned > gain:
                best, gain = number, earned
        return best

    def _pass_s(self, rows: int, is_trial: bool) -> float:
        """Return the seconds of a pass; in a trial the least that they may be, given those of a plain one."""
        return self._policy.pass_s.least(rows, self._num_plain) if is_trial else self._policy.pass_s(rows)

    def _gain_pays(self, index: int, num_ids: int) -> bool:
        """Return whether the expected gain is worth reading so many ids, and the first step would be taken: where it
        would not, only a trial can correct what is expected."""
        is_tried = self._stats(*stream_of(self._texts[index])).trials_left > 0
        num_texts = self._num_later if num_ids > CATCH_UP else self._num_sharing
        catch_up_s = self._policy.step_s(num_ids) - self._policy.step_s(min(num_ids, CATCH_UP))
        is_worth_it = self._gain(index, num_texts) * self._left_s(index, num_texts) > catch_up_s
        return not is_tried and is_worth_it and self._first_step_pays

    def _gain(self, index: int, num_texts: int) -> float:
        """Return the tokens that the drafter is expected to gain for a text in a round of so many."""
        tenant, work = stream_of(self._texts[index])
        stats, of_all = (self._policy.streams.of(each, work, num_texts) for each in (tenant, None))
        if stats.num_drafted or of_all.num_drafted:
            return stats.gain
        return min(stats.gain, self._policy.first_gain(num_texts))  # of passes that may have been measured since

    @cached_property
    def _first_step_pays(self) -> bool:
        """Whether a step over the ends of all texts that gain would be taken, alone or beside the nodes of others that
        the last round had."""
        ends = [1.0] * sum(self._gain(index, self._num_sharing) > 0 for index in range(len(self._texts)))
        num_without = self._policy.num_without[load_of(len(self._texts))]
        return any(self._num_paying(ends, num_nodes, is_trial=False) for num_nodes in (0, num_without))

    def _left_s(self, index: int, num_texts: int) -> float:
        """Return the seconds that one more token in each of a text's rounds with a drafter is worth, in rounds of so
        many texts."""
        text, stream = self._texts[index], stream_of(self._texts[index])
        stats, length = self._policy.streams.of(*stream, num_texts), self._policy.length(*stream).mean
        return min(length, text.max_new_tokens) / stats.emits * self._token_s(num_texts) / stats.speedup_without

    def _token_s(self, num_texts: int) -> float:
        """Return the seconds per token of plain decoding."""
        return self._policy.pass_s(num_texts) / num_texts

    @property
    def _must_try(self) -> bool:
        """Whether something is drafted although nothing is expected to pay; beside texts that gain, a tried one is
        selected with them."""
        return self._has_trial and not self._has_gain

    def _is_tried(self, index: int, num_ids: int) -> bool:
        """Return whether this text is part of a trial, for which only the first text of a stream that could be drafted
        for catches up; where answers have fewer rounds than a trial, each of several does."""
        stream = stream_of(self._texts[index])
        num_same = sum(stream_of(text) == stream for text in self._texts)
        if index != self._first_tried.setdefault(stream, index) and num_ids > CATCH_UP:
            return False
        step_s = self._policy.step_s.least
        round_s = step_s(num_same) + self._pass_s(self._num_plain + num_same, is_trial=True) - self._plain_s
        num_read = max(TRIAL_ROUNDS * self._stats(*stream).emits / self._policy.length(*stream).mean, 1.0)
        trial_s = num_read * (step_s(num_ids) - step_s(min(num_ids, CATCH_UP))) + TRIAL_ROUNDS * round_s
        return self._policy.streams.try_again(*stream, self._num_sharing, trial_s)

    def _stats(self, tenant: str | None, work: Work) -> DraftingStats:
        return self._policy.streams.of(tenant, work, self._num_sharing)

    def _update_next_value(self, value: float) -> bool:
        """Update the value of a further step with this one's; return True for the first step of a round."""
        last, self._last_value = self._last_value, value
        if last:
            self._policy.next_value += EMA_WEIGHT * (min(value / last, 1.0) - self._policy.next_value)
        return last is None
