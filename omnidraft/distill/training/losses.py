"""The losses by name, with the positions that each is evaluated at, and weighted sums of them as settings spell them.

docs/algorithms.md, sections 6 (losses at positions) and 7 (approximate likelihood matching).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from omnidraft.distill.examples.targets import Kind
from omnidraft.distill.training import alm, divergences
from omnidraft.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss and the positions it is meant for."""

    per_position: Callable[[Tensor, Any], Tensor]
    """(logits, targets) -> one number per target; ChunkTargets for chunks, else BucketTargets."""
    positions: Kind


LOSSES: dict[str, Loss] = {
    "dm": Loss(divergences.forward_kl, "boundary"),
    "dm_reverse": Loss(divergences.reverse_kl, "boundary"),
    "dm_paper": Loss(divergences.paper_kl, "direct"),
    "tv": Loss(divergences.total_variation, "boundary"),
    "nll": Loss(divergences.emitted_nll, "emitted"),
    "ngram": Loss(divergences.emitted_nll, "piece"),
    "alm": Loss(alm.chunk_kl, "chunk"),
}


def parse(text: str) -> tuple[tuple[str, float], ...]:
    """Return (name, weight) of each term of a sum such as "dm + 0.2 ngram".

    Raises:
        ConfigError: an unknown name, a weight that is no positive number, or the same name twice.
    """
    terms = tuple(_parse_term(term) for term in text.split("+"))
    if len({name for name, _ in terms}) < len(terms):
        raise ConfigError(f"loss {text!r} names a loss twice")
    return terms


def _parse_term(term: str) -> tuple[str, float]:
    parts = term.replace("*", " ").split()
    name = parts[-1] if parts else ""
    if name not in LOSSES or len(parts) > 2:
        raise ConfigError(f"no loss {term.strip()!r}; write a sum of [weight] name, names: {', '.join(LOSSES)}")
    weight = _number(parts[0]) if len(parts) == 2 else 1.0
    if not 0 < weight < float("inf"):
        raise ConfigError(f"the weight of loss {name!r} must be a positive number, got {parts[0]!r}")
    return name, weight


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError as exc:
        raise ConfigError(f"the weight of a loss must be a positive number, got {text!r}") from exc
