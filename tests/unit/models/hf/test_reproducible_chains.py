"""In reproducible mode every drafted id has the bits that plain decoding gives it, whatever of its chain is kept."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ContractError
from omnidraft.models.hf.padded_session import PassShape
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.ports import DraftTree, Request, Sampling, TreeLimits
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import emitted, tree
from tests.unit.models.random_trees import OracleProposer, random_tree, true_path
from tests.unit.models.tiny import CONFIGS, PASSES, VOCAB_SIZE, text, tiny_model, tiny_target

PROMPT = text(19)
TEXT = text(24, seed=3)
VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())


def plain_scores(target, ids) -> torch.Tensor:
    """Logits after the prompt and after each of these ids, one pass each. [S, V]"""
    session, rows = target.open(PROMPT, 40, "reproducible"), []
    for token in [PROMPT[-1], *ids]:
        rows.append(session.score(DraftTree.empty(token))[0])
        session.keep((0,))
    return torch.stack(rows)


def check_bits(target, rng, following=TEXT) -> None:
    """Decode a text through random chains, of which some begin with it, keeping any part of what is right."""
    plain_SV = plain_scores(target, following)
    session, at = target.open(PROMPT, 40, "reproducible"), 0
    while at < len(following):
        limits = target.limits("reproducible")
        draft = random_tree(rng, [PROMPT[-1], *following][at], following[at:], limits, VOCAB_SIZE)
        scores_NV = session.score(draft)
        nodes = true_path(draft, following[at:])
        assert torch.equal(scores_NV[nodes], plain_SV[at : at + len(nodes)])
        num_kept = int(rng.integers(1, len(nodes) + 1))
        session.keep(nodes[:num_kept])
        at += num_kept


@settings(max_examples=12)
@given(
    name=st.sampled_from(list(CONFIGS)),
    precision=st.sampled_from(["float32", "packed16", "bfloat16"]),
    width=st.sampled_from([2, 4, 6]),
    seed=st.integers(0, 10_000),
)
def test_bits_hold_for_any_width_chain_and_pattern_of_acceptance(name, precision, width, seed):
    shape = PassShape(width, prefill_rows=8, capacity_step=64)
    check_bits(tiny_target(name, precision, shape), np.random.default_rng(seed), TEXT[:6])


@pytest.mark.parametrize(("name", "temperature"), [("llama", 0.0), ("gemma3", 0.7), ("llama", 1.0)])
def test_drafted_texts_are_those_of_plain_decoding(name, temperature):
    target = tiny_target(name, "bfloat16")
    decoder = Decoder(target, VOCABULARY)
    request = Request(tuple(PROMPT), (), 40, Sampling(temperature), seed=4, num_draft_tokens=9, mode="reproducible")
    plain = emitted(decoder.decode(request, None))
    for seed in range(3):
        steps = list(decoder.decode(request, OracleProposer(plain, target.limits("reproducible"), VOCAB_SIZE, seed)))
        assert emitted(steps) == plain
        assert len(steps) < 35


def test_trees_and_longer_chains_are_refused():
    target = tiny_target("llama")
    assert target.limits("reproducible") == TreeLimits(3, num_chains=1, depth=3)
    session = target.open(PROMPT, 10, "reproducible")
    for parents in ([0, 0, 0], [0, 0, 1, 2, 3]):
        with pytest.raises(ContractError, match="num_chains=1"):
            session.score(tree(range(len(parents)), parents))


class LooksAtPadding(TransformersTarget):
    """Planted, and past the self-test: logits depend a little on the end of the pass."""

    def self_test(self, num_slots):
        pass

    def compute(self, slots, ids_S, *args):
        return super().compute(slots, ids_S, *args) + 1e-6 * ids_S[-1]


def test_bits_that_depend_on_the_pass_are_noticed():
    planted = LooksAtPadding(tiny_model("llama"), PASSES, name="x", precision="float32")
    with pytest.raises(AssertionError):
        check_bits(planted, np.random.default_rng(1))
