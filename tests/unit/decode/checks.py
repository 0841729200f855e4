"""Invariants of the decoding core, as functions: the healthy code passes them, planted bugs must not."""

from dataclasses import replace

import numpy as np

from omnidraft.decode.decoder import Decoder
from omnidraft.ports import DraftModel, Noise, Proposer, Request, Target
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import TABLE, TARGET_TOKENIZER, Strict, emitted, slow_decode

QWEN_IDS = 151_936
TAIL_MASS = 1e-6


class Spy:
    """A draft model that remembers every id it was sent, and compares each answer with that of a fresh session."""

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.vocab_size, self.context_limit = model.vocab_size, model.context_limit
        self.has_head = model.has_head
        self.sent: list[int] = []
        self.texts: list[list[int]] = []

    def open(self):
        self._session = self._model.open()
        self._ids: list[int] = []
        return self

    def prefill_or_extend(self, keep, ids):
        self.sent += ids
        self._ids, self._branched = [*self._ids[:keep], *ids], []
        self.texts.append(self._ids)
        logits = self._session.prefill_or_extend(keep, ids)
        assert np.array_equal(logits, self._model.open().prefill_or_extend(0, self._ids)), (
            "a cut-back session differs from a fresh one"
        )
        return logits

    def branch(self, ids, parents):
        logits = self._session.branch(ids, parents)
        for row, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            text = [*(self._ids if parent < 0 else self._branched[parent]), token]
            self._branched.append(text)
            self.texts.append(text)
            fresh = self._model.open().prefill_or_extend(0, text)
            assert np.array_equal(logits[row], fresh), "a branch differs from a fresh one"
        self.sent += ids
        return logits

    def prefill_or_extend_all(self, requests):
        return [session.prefill_or_extend(keep, ids) for session, keep, ids in requests]

    def branch_all(self, requests):
        return [session.branch(ids, parents) for session, ids, parents in requests]

    def acceptance_probabilities(self):
        return self._session.acceptance_probabilities()


def check_text(
    proposer: Proposer | None, request: Request, *, target: Target | None = None, decoder: Decoder | None = None
) -> None:
    """The text is the target's own, by definition."""
    decoder = decoder or Decoder(target or ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, failures=Strict())
    assert emitted(decoder.decode(request, proposer)) == slow_decode(TABLE, request)


def spied(proposer):
    """The proposer with its draft model watched."""
    *others, drafter = proposer.sources
    spy = Spy(drafter.model)
    proposer.sources = (*others, replace(drafter, model=spy))
    return proposer, spy


def tail_wins(make_noise, num_seeds: int) -> int:
    """How often any token of a tail of mass 1e-6 is drawn, at the size of a real vocabulary."""
    p_V = np.full(QWEN_IDS, TAIL_MASS / (QWEN_IDS - 2))
    p_V[:2] = (1 - TAIL_MASS) / 2
    ids = np.arange(QWEN_IDS)
    noises: list[Noise] = [make_noise(seed, 0, QWEN_IDS) for seed in range(num_seeds)]
    return sum(noise.draw(ids, p_V, 1) >= 2 for noise in noises)
