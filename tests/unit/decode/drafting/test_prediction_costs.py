"""What a prediction of an edit costs and saves, in passes and rows, where rows beyond eight cost their arithmetic."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.prediction_source import PredictionSource
from omnidraft.decode.drafting.suffix_source import SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import Request, Sampling
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import Strict, make_request

NUM_IDS, LENGTH = 600, 160
VOCABULARY = Vocabulary(tuple(f"{token} ".encode() for token in range(NUM_IDS)), {}, frozenset())
PASS_S = CostCurve({1: 1.0, 8: 1.07, 12: 1.58, 16: 2.1, 24: 3.07, 32: 4.06})
"""Of Qwen2.5-Coder-1.5B in int8 on two cores with AVX-512, in plain passes."""


def target() -> ToyTarget:
    """A target that says 5, 6, 7, ..."""
    logits_SV = torch.zeros(NUM_IDS, NUM_IDS)
    for token in range(NUM_IDS):
        logits_SV[(token + 1) % NUM_IDS, (token + 1) % NUM_IDS] = 20.0
    return ToyTarget(ToyTable(logits_SV, order=1))


TEXT = list(range(5, 5 + LENGTH))
OTHERS = [Random(0).randrange(300, NUM_IDS) for _ in range(300)]
"""Ids that the text does not have."""


def request(prediction: Sequence[int]) -> Request:
    limits = {"max_new_tokens": LENGTH, "num_draft_tokens": 15, "num_memory_tokens": 31}
    return replace(make_request(Sampling(0.0), **limits), prompt_ids=(4,), prediction_ids=tuple(prediction))


def costs(predictions: Sequence[Sequence[int]]) -> tuple[int, int, float]:
    """The passes and rows of the last of some texts of one client, and its seconds in plain passes."""
    policy = CostPolicy(PASS_S, CostCurve({1: 1e-9}))
    proposer = TreeProposer((PredictionSource(NUM_IDS), SuffixSource(NUM_IDS)), lambda mode: policy)
    decoder = Decoder(target(), VOCABULARY, failures=Strict())
    rows: list[int] = []
    for prediction in predictions:
        steps = list(decoder.decode(request(prediction), proposer))
        assert [token for step in steps for token in step.emitted] == TEXT
        rows = [len(step.tree) for step in steps]
    return len(rows), sum(rows), sum(map(PASS_S, rows))


EDITS = {
    "all of it": (TEXT, 12),
    "insertions": ([*TEXT[:40], *TEXT[46:80], *TEXT[83:]], 24),
    "deletions": ([*TEXT[:40], *OTHERS[:20], *TEXT[40:90], *OTHERS[20:24], *TEXT[90:]], 19),
    "replacements": ([*TEXT[:30], *OTHERS[:2], *TEXT[32:70], OTHERS[2], *TEXT[71:]], 20),
    "a moved block": ([*TEXT[60:100], *TEXT[:60], *TEXT[100:]], 17),
}
"""Predictions with the most passes that the text may take. What it has beside them takes a pass for each id, all other
ids one for eight."""


@pytest.mark.parametrize("edit", EDITS)
def test_behind_every_change_the_prediction_is_found_again_and_few_rows_are_in_vain(edit: str) -> None:
    prediction, max_passes = EDITS[edit]
    passes, rows, _ = costs([prediction] * 3)
    assert passes <= max_passes
    assert rows <= 1.25 * LENGTH


def test_a_wrong_guess_costs_next_to_nothing() -> None:
    """Also for a client whose guesses were right, or wrong, before."""
    for before in ([], [TEXT], [OTHERS]):
        *_, seconds = costs([*before, OTHERS])
        assert seconds <= 1.02 * LENGTH
