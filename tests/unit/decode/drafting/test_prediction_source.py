"""A client's prediction of the answer is drafted first, through changes of every kind, and changes no text."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.prediction_source import PredictionSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.ports import Sampling, Source, TreeLimits
from omnidraft.testing.toy_models import ToyTarget
from tests.unit.decode.toys import NOISE, TABLE, TARGET_PIECES, TARGET_TOKENIZER, Strict, make_request, slow_decode

GUESS = tuple(range(3, 20))
LIMITS = TreeLimits(63)


def make_proposer() -> TreeProposer:
    policy = FixedPolicy()
    return TreeProposer((PredictionSource(len(TARGET_PIECES)),), lambda mode: policy)


def drafted_after(emitted: Sequence[int], prediction: Sequence[int] = GUESS) -> list[int]:
    """The most trusted chain behind an answer that began with these ids."""
    request = make_request(Sampling(0.0), prediction_ids=tuple(prediction), max_new_tokens=100)
    session = make_proposer().open(request)
    for token in emitted:
        session.observe([token])
    tree = session.propose(8, LIMITS, NOISE)
    chain, node = list[int](), 0
    while children := [each for each in range(node + 1, len(tree)) if tree.parents[each] == node]:
        node = children[0]
        chain.append(tree.tokens[node])
    assert set(tree.sources[1:]) <= {Source.PREDICTION}
    return chain


@pytest.mark.parametrize(
    ("emitted", "expected"),
    [
        ((), GUESS),
        (GUESS[:5], GUESS[5:]),
        ((*GUESS[:5], 2, *GUESS[6:8]), GUESS[8:]),
        ((*GUESS[:5], 2, 2, 2, *GUESS[5:7]), GUESS[7:]),
        ((*GUESS[:3], *GUESS[6:9]), GUESS[9:]),
        ((2, 2, *GUESS[:2]), GUESS[2:]),
        (GUESS, ()),
    ],
    ids=["nothing", "its beginning", "a changed id", "inserted ids", "ids left out", "words before it", "all of it"],
)
def test_drafts_go_on_where_the_answer_stands_in_the_prediction(
    emitted: Sequence[int], expected: Sequence[int]
) -> None:
    assert drafted_after(emitted) == list(expected)


def test_behind_a_change_the_prediction_is_tried_on_both_sides() -> None:
    request = make_request(Sampling(0.0), prediction_ids=GUESS, max_new_tokens=100)
    session = make_proposer().open(request)
    session.observe([*GUESS[:8], 2])
    tree = session.propose(8, LIMITS, NOISE)
    firsts = {tree.tokens[node] for node in range(1, len(tree)) if tree.parents[node] == 0}
    assert {GUESS[8], GUESS[9]} <= firsts


def changed(text: Sequence[int], rng: Random) -> list[int]:
    """The text with a tenth of its ids replaced, left out or joined by others."""
    ids: list[int] = []
    for token in text:
        other = rng.randrange(2, len(TARGET_PIECES))
        ids += rng.choice(([other], [], [token, other])) if rng.random() < 0.1 else [token]
    return ids


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("guess", ["right", "changed", "wrong", "no ids of the vocabulary"])
def test_no_prediction_changes_a_text_and_a_good_one_saves_passes(temperature: float, guess: str) -> None:
    request, rng = make_request(Sampling(temperature), seed=5, max_new_tokens=60), Random(1)
    text = slow_decode(TABLE, request)
    prediction = {
        "right": text,
        "changed": changed(text, rng),
        "wrong": [rng.randrange(2, len(TARGET_PIECES)) for _ in range(60)],
        "no ids of the vocabulary": [len(TARGET_PIECES) + token for token in text],
    }[guess]
    decoder = Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, failures=Strict())
    steps = list(decoder.decode(replace(request, prediction_ids=tuple(prediction)), make_proposer()))
    assert [token for step in steps for token in step.emitted] == text
    if guess == "right":
        assert len(steps) <= 3
    if guess == "changed" and len(text) > 40:
        assert len(steps) < 0.6 * len(text)


def test_a_request_that_asks_for_no_drafts_gets_none() -> None:
    request = make_request(Sampling(0.0), prediction_ids=GUESS, num_draft_tokens=0)
    assert request.max_draft_tokens == 0
