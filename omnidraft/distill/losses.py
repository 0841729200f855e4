"""What the drafter is asked to bring down: pure functions, logits in, one number per position out.

Shapes: N positions, V the drafter's vocabulary, S buckets of single draft tokens at one position.
Letters: p is the target's distribution and P its mass per bucket, q and Q the drafter's.
A bucket is one draft token, and all other draft tokens, mapped or not, are the rest bucket. Nothing is renormalised,
and no gradient flows through P. Which positions count, and their mean, is the learner's business.
Source: OmniDraft, https://arxiv.org/abs/2507.02659, section 4.2; buckets instead of its renormalised intersection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from omnidraft.errors import ConfigError

LOG_P_FLOOR = -14.0
"""No bucket is believed to be less likely: the log-probabilities of a trace have 11 bits."""
_OUT = -1e30  # finite, so that a row whose buckets are the whole vocabulary has no NaN in its gradient


@dataclass(frozen=True, slots=True)
class Buckets:
    """What the target believes at N positions, in draft tokens; rows are padded to the widest."""

    ids_NS: Tensor
    """int64; a padded place repeats an id of its row."""
    log_p_NS: Tensor
    """float32, -inf where the mass is zero."""
    real_NS: Tensor
    """bool, False at padding."""
    log_p_rest_N: Tensor
    """float32, -inf when nothing is outside."""

    def __getitem__(self, rows: slice | Tensor) -> "Buckets":
        return Buckets(self.ids_NS[rows], self.log_p_NS[rows], self.real_NS[rows], self.log_p_rest_N[rows])


PerPosition = Callable[[Tensor, Buckets], Tensor]


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the positions it is meant for."""

    per_position: PerPosition
    positions: Literal["boundary", "piece"]
    """boundary: where an emitted target token and a draft token start together; piece: the draft pieces of
    an emitted n-gram, one bucket each."""


def forward_kl_buckets(logits_NV: Tensor, buckets: Buckets) -> Tensor:
    """sum P log(P / Q): asks for mass wherever the target has some. 0 when Q equals P."""
    log_q_NS, log_q_rest_N = log_q(logits_NV, buckets)
    inside_NS = _kl_term(buckets.log_p_NS, log_q_NS)
    rest_N = _kl_term(buckets.log_p_rest_N, log_q_rest_N)
    return inside_NS.where(buckets.real_NS, 0.0).sum(dim=-1) + rest_N


def reverse_kl_buckets(logits_NV: Tensor, buckets: Buckets) -> Tensor:
    """sum Q log(Q / P), the paper's direction: takes mass away where the target has none. 0 when Q equals P."""
    log_q_NS, log_q_rest_N = log_q(logits_NV, buckets)
    inside_NS = log_q_NS.exp() * (log_q_NS - buckets.log_p_NS.clamp_min(LOG_P_FLOOR))
    rest_N = log_q_rest_N.exp() * (log_q_rest_N - buckets.log_p_rest_N.clamp_min(LOG_P_FLOOR))
    return inside_NS.where(buckets.real_NS, 0.0).sum(dim=-1) + rest_N


def emitted_nll(logits_NV: Tensor, buckets: Buckets) -> Tensor:
    """-log q of the row's first bucket, the draft token that was emitted. 0 when q is certain of it."""
    log_q_NS, _ = log_q(logits_NV, buckets)
    return -log_q_NS[:, 0]


def log_q(logits_NV: Tensor, buckets: Buckets) -> tuple[Tensor, Tensor]:
    """log Q of every bucket and of the rest, float32.

    The rest is a logsumexp over what is outside, never 1 minus a sum: it stays exact when it is tiny.
    """
    logits_NV = logits_NV.float()
    logits_NS = logits_NV.gather(1, buckets.ids_NS)
    inside_N = logits_NS.masked_fill(~buckets.real_NS, _OUT).logsumexp(dim=-1)
    outside_N = logits_NV.scatter(1, buckets.ids_NS, _OUT).logsumexp(dim=-1)
    all_N = torch.logaddexp(inside_N, outside_N)
    return logits_NS - all_N[:, None], outside_N - all_N


def _kl_term(log_p: Tensor, log_q: Tensor) -> Tensor:
    return log_p.exp() * (log_p.clamp_min(LOG_P_FLOOR) - log_q)


LOSSES: dict[str, Loss] = {
    "dm": Loss(forward_kl_buckets, "boundary"),
    "dm_reverse": Loss(reverse_kl_buckets, "boundary"),
    "ngram": Loss(emitted_nll, "piece"),
}


def parse(text: str) -> tuple[tuple[str, float], ...]:
    """(name, weight) of each term of a sum such as "dm + 0.2 ngram".

    Raises:
        ConfigError: an unknown name, a weight that is no positive number, or the same name twice.
    """
    terms = tuple(_parse_term(term) for term in text.split("+"))
    if len({name for name, _ in terms}) < len(terms):
        raise ConfigError(f"loss {text!r} names a loss twice")
    return terms


def _parse_term(term: str) -> tuple[str, float]:
    words = term.replace("*", " ").split()
    name = words[-1] if words else ""
    if name not in LOSSES or len(words) > 2:
        raise ConfigError(f"no loss {term.strip()!r}; write a sum of [weight] name, names: {', '.join(LOSSES)}")
    weight = _number(words[0]) if len(words) == 2 else 1.0
    if not 0 < weight < float("inf"):
        raise ConfigError(f"the weight of loss {name!r} must be a positive number, got {words[0]!r}")
    return name, weight


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError as exc:
        raise ConfigError(f"the weight of a loss must be a positive number, got {word!r}") from exc
