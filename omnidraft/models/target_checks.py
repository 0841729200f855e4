"""The check of every target that the bits of a logit do not depend on the rest of its pass, as reproducible mode
requires."""

from collections.abc import Callable, Iterator, Sequence

import torch

from omnidraft.errors import ModeRefused
from omnidraft.ports import DraftTree, TargetSession


class SelfTests:
    """The outcomes of a target's self-tests, which take as long as a few texts."""

    def __init__(self) -> None:
        self._refusals: dict[int, tuple[str, str] | None] = {}
        """The reason and the advice of the self-test of a size; None where it passed."""

    def require(self, size: int, self_test: Callable[[], None]) -> None:
        """Run the self-test of this size, unless it has been run. Raises ModeRefused where it failed."""
        if size not in self._refusals:
            try:
                self_test()
                self._refusals[size] = None
            except ModeRefused as exc:
                self._refusals[size] = exc.reason, exc.advice
        refusal = self._refusals[size]
        if refusal is not None:
            raise ModeRefused(*refusal)


def is_deterministic(alone: TargetSession, blocks: TargetSession, *, vocab_size: int, chains: int, width: int) -> bool:
    """Return whether full passes, begun at every offset, give the same bits as one id at a time.

    Each chain of the pass in turn holds the text, and all the others hold arbitrary ids.

    Args:
        alone: an empty session, for passes over one id.
        blocks: another empty session, for full passes.
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
    """Score one id by itself, keep it and return its logits [V]."""
    logits_NV = session.score(DraftTree.empty(token))
    session.keep((0,))
    return logits_NV[0]


def _blocks(text: Sequence[int], chains: int, vocab_size: int) -> Iterator[tuple[DraftTree, list[int]]]:
    """Yield, for every chain, a full tree whose root begins the text and whose chain of that number continues it, and
    the nodes of the text."""
    depth = len(text) - 1
    parents = [0] + [0 if node % depth == 0 else node for node in range(chains * depth)]
    for chain in range(chains):
        drafted = [(31 * node + 11 * text[0] + 5) % vocab_size for node in range(chains * depth)]
        first = chain * depth
        drafted[first : first + depth] = text[1:]
        tokens = (text[0], *drafted)
        tree = DraftTree(tokens, tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))
        yield tree, [0, *range(first + 1, first + depth + 1)]
