"""Members of an ensemble answer together; tests/contract/test_target.py has what it shares with every target."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ConfigError
from omnidraft.models.ensemble import EnsembleTarget, mean_logits
from omnidraft.ports import DraftTree, Request, Sampling
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import RandomTrees, emitted
from tests.unit.models.tiny import VOCAB_SIZE, text, tiny_target

VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())


def toy(seed: int, vocab_size: int = VOCAB_SIZE) -> ToyTarget:
    return ToyTarget(ToyTable.random(vocab_size, seed=seed), context_limit=256)


@given(st.integers(2, 4), st.integers(0, 99))
@settings(max_examples=40)
def test_the_mean_is_that_of_the_members_distributions(num_members: int, seed: int) -> None:
    logits = 10 * torch.randn(num_members, 3, 5, generator=torch.Generator().manual_seed(seed))
    p = logits.softmax(dim=-1).mean(dim=0)
    torch.testing.assert_close(mean_logits(list(logits)).softmax(dim=-1), p, atol=1e-6, rtol=1e-4)


def test_copies_of_one_model_answer_as_it_does_alone() -> None:
    alone, together = toy(1), EnsembleTarget([toy(1), toy(1), toy(1)])
    prompt = text(6)
    scores = [each.open(prompt, 9, "fast").score(DraftTree.empty(3)) for each in (alone, together)]
    torch.testing.assert_close(scores[1].softmax(-1), scores[0].softmax(-1))


def test_no_draft_shows_in_the_text_of_an_ensemble() -> None:
    """At T = 1. In reproducible mode one of the members takes narrower trees, and so does the ensemble."""
    target = EnsembleTarget([tiny_target("llama"), toy(2)])
    request = Request(tuple(text(9)), (), 16, Sampling(1.0), seed=3, mode="fast")
    decoder = Decoder(target, VOCABULARY)
    plain = emitted(decoder.decode(request, None))
    assert emitted(decoder.decode(request, RandomTrees(4, VOCAB_SIZE))) == plain
    assert target.limits("reproducible").depth is not None


@pytest.mark.parametrize(("members", "words"), [([toy(1)], "two members"), ([toy(1), toy(2, 7)], "one vocabulary")])
def test_what_is_no_ensemble_is_refused(members: list[ToyTarget], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnsembleTarget(members)
