"""Decoders with a classic mistake each, for tests of the checks that find them."""

from typing import ClassVar

from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.testing.toy_models import ToyTarget, ToyTargetSession
from tests.unit.decode.toys import (
    TABLE,
)


class RootRowForAll(ToyTarget):
    """Every node's distribution is computed as if the text ended at the root."""

    def open(self, prompt_ids, max_new_tokens, mode):
        class Session(ToyTargetSession):
            def _score(self, tree):
                logits_NV = super()._score(tree)
                return logits_NV[:1].expand_as(logits_NV)

        return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)


class StreamNoise(SeededNoise):
    """One stream of numbers for whoever asks next, as a generator object gives them."""

    def __init__(self, seed, choice, vocab_size):
        super().__init__(seed, choice, vocab_size)
        self._num_asked = 0

    def _uniforms_at(self, position):
        self._num_asked += 1
        return super()._uniforms_at(self._num_asked)


class LeftoverNoise(SeededNoise):
    """Numbers drawn ahead for drafted positions stay in a queue when the draft is rejected, and serve the next ones."""

    def __init__(self, seed, choice, vocab_size):
        super().__init__(seed, choice, vocab_size)
        self._ahead: list[int] = []

    def exponentials(self, position, ids):
        self._ahead.append(position)
        return super().exponentials(position, ids)

    def draw(self, ids_M, p_M, position):
        return super().draw(ids_M, p_M, self._ahead.pop(0) if self._ahead else position)


class Keeps(ToyTarget):
    """Keeps other nodes than those it received."""

    wrong: ClassVar[dict] = {
        "rejected branch left": lambda tree, nodes: range(len(tree)),
        "first nodes instead of the path": lambda tree, nodes: range(len(nodes)),
        "path without its root": lambda tree, nodes: nodes[1:],
    }

    def __init__(self, name):
        super().__init__(TABLE)
        self._wrong = self.wrong[name]

    def open(self, prompt_ids, max_new_tokens, mode):
        choose = self._wrong

        class Session(ToyTargetSession):
            def keep(self, nodes):
                tree, self._scored = self._scored, None
                self.kept += [tree.tokens[node] for node in choose(tree, nodes)]
                self.num_kept = len(self.kept)

        return Session(self, prompt_ids[:-1], 10**6)
