"""The losses by name, which positions each is asked at, and weighted sums of them as configuration spells them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from omnidraft.distill.training import alm, divergences
from omnidraft.errors import ConfigError

Kind = Literal["boundary", "direct", "emitted", "piece", "believed piece", "rejected", "chunk"]
"""Where a loss is asked:
boundary: an emitted target token and a draft token start together, and the target told its beliefs;
direct: the same positions, seen through the draft tokens that are target tokens;
emitted: the same, also without beliefs, wherever the drafter has a token for what came;
piece: the draft pieces of an emitted n-gram; believed piece: the same where the target told its beliefs;
rejected: a boundary where a drafted token was refused, once for each such token;
chunk: draft tokens between two places where the tokenisations meet."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the positions it is meant for."""

    per_position: Callable[[Tensor, Any], Tensor]
    """(logits, what is asked) -> one number per position; asked are alm.Chunks of chunks, else Buckets."""
    positions: Kind


LOSSES: dict[str, Loss] = {
    "dm": Loss(divergences.forward_kl, "boundary"),
    "dm_reverse": Loss(divergences.reverse_kl, "boundary"),
    "dm_mixed": Loss(divergences.mixed_kl, "boundary"),
    "dm_paper": Loss(divergences.paper_kl, "direct"),
    "jsd": Loss(divergences.jensen_shannon, "boundary"),
    "tv": Loss(divergences.total_variation, "boundary"),
    "lk": Loss(divergences.lk_hybrid, "boundary"),
    "osd": Loss(divergences.wrong_token_kl, "boundary"),
    "nll": Loss(divergences.emitted_nll, "emitted"),
    "ngram": Loss(divergences.emitted_nll, "piece"),
    "ngram_p": Loss(divergences.weighted_nll, "believed piece"),
    "rejected": Loss(divergences.rejected_kl, "rejected"),
    "alm": Loss(alm.chunk_kl, "chunk"),
    "alm_tv": Loss(alm.chunk_tv, "chunk"),
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
