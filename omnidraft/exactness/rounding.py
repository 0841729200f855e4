"""How far the logits of one-row, many-row and prefill passes over the same text lie apart on this model and machine.

Shapes: N nodes of a tree, P positions of the answer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from omnidraft.decode.loop import Decoder
from omnidraft.exactness.tracing_target import trace_tokens
from omnidraft.ports import DraftTree, Request, Source, Target

MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """What was measured."""

    largest: float
    """Largest difference of one logit between two passes over the same text."""
    num_positions: int

    @property
    def limit(self) -> float:
        """A difference that rounding explains. The margin is for what fewer positions than are checked can show: of
        many more, some round worse than all that were measured."""
        return MARGIN * self.largest

    def __add__(self, other: "Rounding") -> "Rounding":
        return Rounding(max(self.largest, other.largest), self.num_positions + other.num_positions)


def measure(decoder: Decoder, request: Request) -> Rounding:
    """Over the request's own plain answer: one row a pass, chains and trees up to the request's size, and prefill."""
    plain = replace(request, num_draft_tokens=0)
    drawn = list(trace_tokens(decoder, plain, None))
    ids, rows = [each.token for each in drawn], [each.logits_V for each in drawn]
    half = len(ids) // 2
    pairs = [(_prefill_logits(decoder.target, plain, ids[:half]), rows[half])]
    limits = decoder.target.limits(request.mode)
    largest = min(request.num_draft_tokens, limits.num_nodes)
    for size in _sizes(largest):
        pairs += zip(_tree_logits(decoder.target, request, ids, rows, size, has_leaves=False), rows, strict=True)
    if limits.num_chains is None:
        pairs += zip(_tree_logits(decoder.target, request, ids, rows, largest, has_leaves=True), rows, strict=True)
    return Rounding(max(logit_difference(*pair) for pair in pairs), len(pairs))


def _sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and the largest: kernels change with the number of rows."""
    return sorted({largest, *(1 << power for power in range(largest.bit_length()))})


def _tree_logits(
    target: Target, request: Request, ids: Sequence[int], rows: Sequence[torch.Tensor], size: int, *, has_leaves: bool
) -> list[torch.Tensor]:
    """The logits before each of these ids, from passes over trees of `size` drafted nodes."""
    session = target.open(request.prompt_ids, request.max_new_tokens, request.mode)
    scored: list[torch.Tensor] = []
    root = request.prompt_ids[-1]
    while (done := len(scored)) < len(ids):
        num_nodes = min(size, request.max_new_tokens - done - 1)
        tree, spine = _tree(root, ids[done:-1], rows[done:], num_nodes, has_leaves=has_leaves)
        logits_NV = session.score(tree)
        scored += [logits_NV[node] for node in spine]
        session.keep(spine)
        root = ids[len(scored) - 1]
    session.close()
    return scored


def _tree(
    root: int, ids: Sequence[int], rows: Sequence[torch.Tensor], num_nodes: int, *, has_leaves: bool
) -> tuple[DraftTree, list[int]]:
    """A tree along these ids, with a likely leaf beside each of them where there is room; and its spine."""
    tokens, parents, spine = [root], [0], [0]
    for token, row_V in zip(ids, rows, strict=False):
        likely = [int(each) for each in row_V.topk(2).indices if has_leaves]
        siblings = [token, *(each for each in likely if each != token)][: min(2, num_nodes + 1 - len(tokens))]
        if not siblings:
            break
        parents += [spine[-1]] * len(siblings)
        spine.append(len(tokens))
        tokens += siblings
    sources = (None, *[Source.LOOKUP] * (len(tokens) - 1))
    return DraftTree(tuple(tokens), tuple(parents), sources, (0.0,) * len(tokens)), spine


def _prefill_logits(target: Target, request: Request, ids: Sequence[int]) -> torch.Tensor:
    """The logits after prompt and ids, all but the last read as one prompt. [V]"""
    prompt_ids = (*request.prompt_ids, *ids)
    session = target.open(prompt_ids, request.max_new_tokens - len(ids), request.mode)
    logits_V = session.score(DraftTree.empty(prompt_ids[-1]))[0]
    session.close()
    return logits_V


def logit_difference(one_V: torch.Tensor, other_V: torch.Tensor) -> float:
    """The largest of one token; of two infinities of one sign it is 0."""
    return float(torch.where(one_V == other_V, 0.0, (one_V - other_V).abs()).max())
