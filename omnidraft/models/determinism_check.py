"""Whether the bits of a logit depend on what else was in its pass: the question that reproducible mode rests on."""

from collections.abc import Iterator, Sequence

import torch

from omnidraft.ports import DraftTree, TargetSession


def is_deterministic(alone: TargetSession, blocks: TargetSession, *, vocab_size: int, chains: int, width: int) -> bool:
    """Compare full passes, begun at every offset, with one id at a time, bit by bit.

    Each chain of the pass in turn holds the text, and all the others hold junk.

    Args:
        alone: a session without any ids, of the shape in question.
        blocks: another one.
    """
    ids = [(7 * i + 3) % vocab_size for i in range(2 * width)]
    alone_SV = torch.stack([_extend(alone, token) for token in ids])
    for start in range(width):
        text, expected_SV = ids[start : start + width], alone_SV[start : start + width]
        for tree, nodes in _blocks(text, chains, vocab_size):
            if not torch.equal(blocks.score(tree)[nodes], expected_SV):
                return False
        blocks.keep((0,))
    return True


def _extend(session: TargetSession, token: int) -> torch.Tensor:
    """Score one id by itself and keep it. [V]"""
    logits_NV = session.score(DraftTree.empty(token))
    session.keep((0,))
    return logits_NV[0]


def _blocks(text: Sequence[int], chains: int, vocab_size: int) -> Iterator[tuple[DraftTree, list[int]]]:
    """For every chain: a full tree whose root begins the text and whose chain of that number goes on with it, and the
    nodes of the text."""
    depth = len(text) - 1
    parents = [0] + [0 if node % depth == 0 else node for node in range(chains * depth)]
    for chain in range(chains):
        drafted = [(31 * node + 11 * text[0] + 5) % vocab_size for node in range(chains * depth)]
        first = chain * depth
        drafted[first : first + depth] = text[1:]
        tokens = (text[0], *drafted)
        tree = DraftTree(tokens, tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))
        yield tree, [0, *range(first + 1, first + depth + 1)]
