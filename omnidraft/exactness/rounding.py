"""Measure how much one-row, many-row and prefill passes over the same text differ on this model and machine.

Shapes: N nodes of a tree, P positions of the answer, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.exactness.tracing_target import trace_tokens
from omnidraft.ports import DraftTree, Request, Source, Target

MARGIN = 2.0


@dataclass(frozen=True, slots=True)
class Rounding:
    """The measured difference between passes."""

    largest: float
    """Largest difference of one logit between two passes over the same text."""
    num_positions: int

    @property
    def limit(self) -> float:
        """The largest difference that rounding explains. The margin allows for positions that were not measured: among
        many more, some round worse than all of these."""
        return MARGIN * self.largest

    def __add__(self, other: "Rounding") -> "Rounding":
        return Rounding(max(self.largest, other.largest), self.num_positions + other.num_positions)


def measure(decoder: Decoder, request: Request) -> Rounding:
    """Measure over the request's plain answer: one row a pass, chains and trees up to its draft size, and prefill."""
    plain = replace(request, num_draft_tokens=0)
    tokens = list(trace_tokens(decoder, plain, None))
    ids, rows = [each.token for each in tokens], [each.logits_V for each in tokens]
    half = len(ids) // 2
    pairs = [(_prefill_logits(decoder.target, plain, ids[:half]), rows[half])]
    limits = decoder.target.limits(request.mode)
    largest = min(request.max_draft_tokens, limits.num_nodes)
    for size in _sizes(largest):
        pairs += zip(_tree_logits(decoder.target, request, ids, rows, size, has_leaves=False), rows, strict=True)
    if limits.num_chains is None:
        pairs += zip(_tree_logits(decoder.target, request, ids, rows, largest, has_leaves=True), rows, strict=True)
    return Rounding(max(logit_difference(*pair) for pair in pairs), len(pairs))


def _sizes(largest: int) -> list[int]:
    """Return 1, 2, 4, ... and the largest, because kernels change with the number of rows."""
    return sorted({largest, *(1 << power for power in range(largest.bit_length()))})


def _tree_logits(
    target: Target, request: Request, ids: Sequence[int], rows: Sequence[torch.Tensor], size: int, *, has_leaves: bool
) -> list[torch.Tensor]:
    """Return the logits before each of these ids, from passes over trees of `size` drafted nodes."""
    session = target.open(request.prompt_ids, request.max_new_tokens, request.mode)
    scored: list[torch.Tensor] = []
    root = request.prompt_ids[-1]
    while (done := len(scored)) < len(ids):
        num_nodes = min(size, request.max_new_tokens - done - 1)
        tree, path = _tree(root, ids[done:-1], rows[done:], num_nodes, has_leaves=has_leaves)
        logits_NV = session.score(tree)
        scored += [logits_NV[node] for node in path]
        session.keep(path)
        root = ids[len(scored) - 1]
    session.close()
    return scored


def _tree(
    root: int, ids: Sequence[int], rows: Sequence[torch.Tensor], num_nodes: int, *, has_leaves: bool
) -> tuple[DraftTree, list[int]]:
    """Return a tree along these ids, with a likely leaf beside each of them while nodes are left, and the path of the
    ids."""
    tokens, parents, path = [root], [0], [0]
    for token, row_V in zip(ids, rows, strict=False):
        likely = [int(each) for each in row_V.topk(2).indices if has_leaves]
        siblings = [token, *(each for each in likely if each != token)][: min(2, num_nodes + 1 - len(tokens))]
        if not siblings:
            break
        parents += [path[-1]] * len(siblings)
        path.append(len(tokens))
        tokens += siblings
    sources = (None, *[Source.LOOKUP] * (len(tokens) - 1))
    return DraftTree(tuple(tokens), tuple(parents), sources, (0.0,) * len(tokens)), path


def _prefill_logits(target: Target, request: Request, ids: Sequence[int]) -> torch.Tensor:
    """Return the logits [V] after prompt and ids, with all but the last prefilled as one prompt."""
    prompt_ids = (*request.prompt_ids, *ids)
    session = target.open(prompt_ids, request.max_new_tokens - len(ids), request.mode)
    logits_V = session.score(DraftTree.empty(prompt_ids[-1]))[0]
    session.close()
    return logits_V


def logit_difference(one_V: torch.Tensor, other_V: torch.Tensor) -> float:
    """Return the largest difference of one token's logits; it is 0 between infinities of one sign."""
    return float(torch.where(one_V == other_V, 0.0, (one_V - other_V).abs()).max())
