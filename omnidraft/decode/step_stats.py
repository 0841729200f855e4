"""Counts and timings of decoded texts, added up over their steps."""

import time
from collections import Counter
from dataclasses import dataclass, field, fields

from omnidraft.ports import Step


@dataclass(slots=True)
class DecodeStats:
    """Counts of one or more texts; ratios are computed on access."""

    num_tokens: int = 0
    num_passes: int = 0
    num_scored: int = 0
    """Positions where at least one token was drafted; see DraftTree.scored_positions."""
    num_agreed: int = 0
    """Scored positions whose first-ranked candidate is the token that the target drew."""
    draft_s: float = 0.0
    target_s: float = 0.0
    other_s: float = 0.0
    first_token_s: float = 0.0
    """Seconds from the request to the first step's tokens: prefill and queueing, not decoding speed."""
    queue_s: float = 0.0
    """Seconds of `first_token_s` before decoding began."""
    decode_s: float = 0.0
    """Seconds from the first step to the last."""
    num_later_tokens: int = 0
    """Tokens of the steps after the first, which `decode_s` was spent on."""
    accepted_by_source: Counter[str] = field(default_factory=Counter)
    accepted_per_pass: Counter[int] = field(default_factory=Counter)
    drafted_per_pass: Counter[int] = field(default_factory=Counter)
    """Passes by the number of tokens that were drafted for them, all branches counted."""
    scored_by_depth: Counter[int] = field(default_factory=Counter)
    """Passes that reached this depth of the tree and had at least one token drafted there; a tree's first nodes are
    depth 1."""
    agreed_by_depth: Counter[int] = field(default_factory=Counter)
    """Passes in which the target drew one of those tokens."""
    _started: float = field(default_factory=time.perf_counter)
    _first: float | None = None

    def begin(self) -> None:
        """Note the end of the wait: the text is decoded from now on."""
        self.queue_s = time.perf_counter() - self._started

    def take(self, step: Step) -> None:
        """Add one step that has just ended."""
        now = time.perf_counter()
        if self._first is None:
            self._first, self.first_token_s = now, now - self._started
        else:
            self.num_later_tokens += len(step.emitted)
        self.decode_s = now - self._first
        self.num_tokens += len(step.emitted)
        self.num_passes += 1
        scored = step.tree.scored_positions(step.path, len(step.emitted))
        self.num_scored += len(scored)
        self.num_agreed += sum(is_agreed for _, is_agreed in scored)
        self.draft_s += step.timings.draft_s
        self.target_s += step.timings.target_s
        self.other_s += step.timings.other_s
        self.accepted_by_source.update(str(step.tree.sources[node]) for node in step.path)
        self.accepted_per_pass[len(step.path)] += 1
        self.drafted_per_pass[len(step.tree) - 1] += 1
        self.scored_by_depth.update(range(1, len(scored) + 1))
        self.agreed_by_depth.update(range(1, len(step.path) + 1))

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        """Return the sum of both."""
        both = DecodeStats()
        for each in fields(self):
            if not each.name.startswith("_"):
                setattr(both, each.name, getattr(self, each.name) + getattr(other, each.name))
        return both

    @property
    def tokens_per_pass(self) -> float:
        """Block efficiency: emitted tokens per target pass."""
        return self.num_tokens / max(self.num_passes, 1)

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first step per second of decoding."""
        return self.num_later_tokens / self.decode_s if self.decode_s else 0.0

    @property
    def request_tokens_per_s(self) -> float:
        """All tokens per second of the whole request, prefill of both models included."""
        spent_s = self.first_token_s + self.decode_s
        return self.num_tokens / spent_s if spent_s else 0.0

    @property
    def agreement(self) -> float | None:
        """Share of scored positions that agreed; None when nothing was drafted."""
        return self.num_agreed / self.num_scored if self.num_scored else None

    @property
    def agreement_by_depth(self) -> list[float]:
        """Accepted passes over scored passes at depth 1, 2, ..."""
        return [self.agreed_by_depth[depth] / self.scored_by_depth[depth] for depth in sorted(self.scored_by_depth)]

    def summary(self) -> dict[str, object]:
        """Return plain data for responses and reports."""
        return {
            "num_tokens": self.num_tokens,
            "num_passes": self.num_passes,
            "num_later_tokens": self.num_later_tokens,
            "num_scored": self.num_scored,
            "num_agreed": self.num_agreed,
            "tokens_per_pass": round(self.tokens_per_pass, 4),
            "tokens_per_s": round(self.tokens_per_s, 4),
            "agreement": self.agreement,
            "agreement_by_depth": self.agreement_by_depth,
            "first_token_s": round(self.first_token_s, 4),
            "decode_s": round(self.decode_s, 4),
            "draft_s": round(self.draft_s, 4),
            "target_s": round(self.target_s, 4),
            "other_s": round(self.other_s, 4),
            "accepted_by_source": dict(self.accepted_by_source),
            "accepted_per_pass": {str(count): times for count, times in sorted(self.accepted_per_pass.items())},
        }
