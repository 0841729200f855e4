"""The policy that drafts the trees with the most tokens per second, by the measured costs of passes and drafter steps.

The rows of all texts of a round share one pass and the drafter's steps, so their prefixes and nodes compete. Tokens and
seconds are summed over rounds; their ratio is the rate that every further node or step must beat with what it adds to
both (Dinkelbach's method for ratios: https://doi.org/10.1287/mnsc.13.7.492; docs/algorithms.md section 10). It is a
multiple of plain decoding's rate, since that changes with the number of texts. Rows of prompts in the same pass make
further rows dearer, and their own time is not the drafts'.
When drafting does not beat plain decoding it stops, and is tried again now and then for a small share of the time, so
that a recovery is seen. The measured gain of rounds with a drafter decides that, so no wrong estimate can make it lose
for long. A text that the drafter has not read yet is read only when the rest of the answer is expected to pay for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from omnidraft.ports import RoundText, TextOutcome, Work

TRIAL_SHARE = 0.02
"""Share of the time without drafting that trials may cost."""
_TRIAL_ROUNDS = 4
_CATCH_UP = 4
"""Ids that an active drafter reads at most before its next step; more count as catching up."""
_EMA_WEIGHT = 0.03
"""Weight of a new observation in a moving average."""
_FIRST_ROUNDS = 10
"""Rounds that the prior gain counts for."""
_PRIOR_AGREEMENT, _PRIOR_DEPTH = 0.65, 4
_FIRST_GAIN, _MIN_GAIN = 0.2, -0.1
"""Tokens per text and round above plain decoding: the largest prior gain of drafting, and the lowest estimate, so that
a few good trials bring drafting back."""
_DECAY = 0.97
"""Decay per round of the sums of seconds: about 30 rounds count."""
_MAX_STREAMS = 512
"""Tenants and kinds of requests with statistics of their own; the least recently seen one is dropped."""

Seconds = Callable[[int], float]
"""Seconds by number of rows."""


@dataclass(slots=True)
class DraftingStats:
    """The gain of drafting for one tenant's texts of one kind."""

    gain: float
    emits: float = 2.0
    """Tokens per text and round with a drafter."""
    length: float = 128.0
    """Tokens of an answer."""
    num_drafted: int = 0
    """Rounds with a drafter."""
    trials_left: int = 0
    idle_s: float = 0.0
    """Seconds without a drafter that no trial was taken from."""
    plain_s: float = 0.0
    """Seconds that recent rounds' tokens would have taken without drafting."""
    seconds: float = 0.0
    """Seconds that they took."""

    def add(self, outcomes: Sequence[tuple[TextOutcome, float]], token_s: float) -> None:
        """Add these texts of a round, each with its seconds; a token of plain decoding takes `token_s`."""
        drafted = [(outcome.num_emitted, seconds) for outcome, seconds in outcomes if any(outcome.step_rows)]
        if drafted:
            emits = sum(emitted for emitted, _ in drafted) / len(drafted)
            self._add_gain(emits, emits - sum(seconds for _, seconds in drafted) / len(drafted) / token_s)
        self.idle_s += sum(seconds for outcome, seconds in outcomes if not any(outcome.step_rows))
        num_emitted = sum(outcome.num_emitted for outcome, _ in outcomes)
        self.plain_s = self.plain_s * _DECAY + num_emitted * token_s
        self.seconds = self.seconds * _DECAY + sum(seconds for _, seconds in outcomes)

    def _add_gain(self, emits: float, earned: float) -> None:
        """Add a round with a drafter: tokens per text, and how many of them exceed plain decoding."""
        weight = max(_EMA_WEIGHT, 1 / (_FIRST_ROUNDS + self.num_drafted))
        self.num_drafted += 1
        self.trials_left = max(self.trials_left - 1, 0)
        self.gain = max(self.gain + weight * (earned - self.gain), _MIN_GAIN)
        self.emits += weight * (emits - self.emits)


class CostPolicy:
    """Implements ports.Policy for one target and mode. Every tenant has its own gain and trials for each kind of
    request, so that losses with one kind do not end the gains of another."""

    def __init__(self, pass_s: Seconds, step_s: Seconds, num_candidates: int = 4) -> None:
        """Take the seconds of a pass and of a drafter step by their rows."""
        self.pass_s, self.step_s, self.num_candidates = pass_s, step_s, num_candidates
        self.next_value = 0.5
        """Share of a prefix's probability that its best child has: the tokens that one more drafter step gives."""
        self._stats: Callable[[str, Work], DraftingStats] = lru_cache(_MAX_STREAMS)(self._new_stats)

    def stats(self, tenant: str, work: Work = "text") -> DraftingStats:
        """Return what drafting gained for this tenant's texts of this kind."""
        return self._stats(tenant, work)

    def start_round(self, texts: Sequence[RoundText], num_other_rows: int = 0) -> "CostPlan":
        """See ports.Policy."""
        return CostPlan(self, texts, num_other_rows)

    def update(self, outcomes: Sequence[TextOutcome], num_other_rows: int = 0) -> None:
        """See ports.Policy. Seconds are those of the cost curves, which are smoother than the clock's; catching up was
        paid for when the ids were read."""
        token_s = self.pass_s(len(outcomes)) / len(outcomes)
        with_seconds = list(zip(outcomes, self._seconds(outcomes, num_other_rows), strict=True))
        for stream in dict.fromkeys(_stream(outcome) for outcome in outcomes):
            self.stats(*stream).add([each for each in with_seconds if _stream(each[0]) == stream], token_s)

    def finish(self, tenant: str, num_emitted: int, work: Work = "text") -> None:
        """See ports.Policy."""
        if num_emitted:
            stats = self.stats(tenant, work)
            stats.length += _EMA_WEIGHT * (num_emitted - stats.length)

    def _seconds(self, outcomes: Sequence[TextOutcome], num_other_rows: int) -> list[float]:
        """Return the seconds of each text: its share of a plain pass, and of nodes and steps by their number."""
        num_plain, num_nodes = len(outcomes) + num_other_rows, sum(outcome.num_nodes for outcome in outcomes)
        node_s = (self.pass_s(num_plain + num_nodes) - self.pass_s(num_plain)) / max(num_nodes, 1)
        seconds = [self.pass_s(len(outcomes)) / len(outcomes) + node_s * each.num_nodes for each in outcomes]
        for rows in zip(*(outcome.step_rows for outcome in outcomes), strict=True):
            capped = [min(each, _CATCH_UP) for each in rows]
            row_s = self.step_s(sum(capped)) / max(sum(capped), 1)
            seconds = [spent + row_s * each for spent, each in zip(seconds, capped, strict=True)]
        return seconds

    def _new_stats(self, tenant: str, work: Work) -> DraftingStats:
        return DraftingStats(min(_FIRST_GAIN, max(_MIN_GAIN, self._prior_gain())))

    def _prior_gain(self) -> float:
        """Return the gain of the best chain at the prior agreement of a useful drafter, for a text alone."""
        best, tokens = -1.0, 0.0
        for depth in range(1, _PRIOR_DEPTH + 1):
            tokens += _PRIOR_AGREEMENT**depth
            spent_s = self.pass_s(1 + depth) - self.pass_s(1) + depth * self.step_s(1)
            best = max(best, tokens - spent_s / self.pass_s(1))
        return best


class CostPlan:
    """Implements ports.RoundPlan."""

    uses_acceptance_head = False

    def __init__(self, policy: CostPolicy, texts: Sequence[RoundText], num_other_rows: int) -> None:
        self.num_candidates = policy.num_candidates
        self._policy = policy
        self._texts = texts
        self._num_plain = len(texts) + num_other_rows
        self._token_s = policy.pass_s(len(texts)) / len(texts)
        """Seconds per token of plain decoding."""
        self._plain_s = policy.pass_s(self._num_plain)
        self._last_value: float | None = None
        self._has_trial = self._has_gain = False

    @property
    def rate(self) -> float:
        """Tokens per second that further drafting must beat; at least that of plain decoding."""
        stats = [self._policy.stats(*stream) for stream in {_stream(text) for text in self._texts}]
        seconds = sum(each.seconds for each in stats)
        speedup = max(sum(each.plain_s for each in stats) / seconds, 1.0) if seconds else 1.0
        return speedup / self._token_s

    def should_draft(self, index: int, num_ids: int) -> bool:
        """See ports.RoundPlan."""
        text, step_s = self._texts[index], self._policy.step_s
        stats = self._policy.stats(*_stream(text))
        catch_up_s = step_s(num_ids) - step_s(min(num_ids, _CATCH_UP))
        rounds = min(stats.length, text.max_new_tokens) / stats.emits
        if not stats.trials_left and stats.gain * rounds * self._token_s > catch_up_s:
            self._has_gain = True
            return True
        is_tried = self._is_tried(stats, index, num_ids, catch_up_s)
        self._has_trial |= is_tried
        return is_tried

    def select_expansions(self, values: Sequence[float], num_nodes: int) -> int:
        """See ports.RoundPlan. A step over several rows costs little more than one over a single row. A row of the pass
        costs what it does on average when every text has one more."""
        is_first = self._update_next_value(values[0])
        scored = self._num_plain + num_nodes
        node_s = (self._policy.pass_s(scored + len(self._texts)) - self._policy.pass_s(scored)) / len(self._texts)
        best, gain, tokens, rate = int(is_first and self._must_try), 0.0, 0.0, self.rate
        for rows, value in enumerate(values, 1):
            tokens += value * self._policy.next_value
            earned = tokens - rate * (self._policy.step_s(rows) + rows * node_s)
            if earned > gain:
                best, gain = rows, earned
        return best

    def prune(self, values: Sequence[float]) -> int:
        """See ports.RoundPlan."""
        is_trial = self._must_try and self._last_value is not None
        best, gain, tokens, rate = int(is_trial and len(values) > 0), 0.0, 0.0, self.rate
        for num_nodes, value in enumerate(values, 1):
            tokens += value
            earned = tokens - rate * (self._policy.pass_s(self._num_plain + num_nodes) - self._plain_s)
            if earned > gain:
                best, gain = num_nodes, earned
        return best

    @property
    def _must_try(self) -> bool:
        """Whether something is drafted although nothing is expected to pay; beside texts that gain, a tried one is
        selected with them."""
        return self._has_trial and not self._has_gain

    def _is_tried(self, stats: DraftingStats, index: int, num_ids: int, catch_up_s: float) -> bool:
        """Return whether this text is part of a trial, for which only the first text of a stream catches up."""
        stream = _stream(self._texts[index])
        same = [number for number, text in enumerate(self._texts) if _stream(text) == stream]
        if index != same[0] and num_ids > _CATCH_UP:
            return False
        if not stats.trials_left:
            pass_s = self._policy.pass_s(self._num_plain + len(same)) - self._plain_s
            trial_s = catch_up_s + _TRIAL_ROUNDS * (self._policy.step_s(len(same)) + pass_s)
            if trial_s < TRIAL_SHARE * stats.idle_s:
                stats.trials_left, stats.idle_s = _TRIAL_ROUNDS, 0.0
        return stats.trials_left > 0

    def _update_next_value(self, value: float) -> bool:
        """Update the value of a further step with this one's; return True for the first step of a round."""
        last, self._last_value = self._last_value, value
        if last:
            self._policy.next_value += _EMA_WEIGHT * (min(value / last, 1.0) - self._policy.next_value)
        return last is None


def _stream(text: RoundText | TextOutcome) -> tuple[str, Work]:
    """Return what the text's gains are counted for: its tenant and its kind."""
    return text.tenant, text.work
