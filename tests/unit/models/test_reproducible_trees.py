"""Reproducible mode over trees: a batch of chains gives every node the bits that plain decoding gives it."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ConfigError, ContractError
from omnidraft.models.hf.padded_session import PassShape
from omnidraft.models.hf.target import TransformersTarget
from omnidraft.ports import DraftTree, Request, Sampling, TreeLimits
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import emitted, tree
from tests.unit.models.random_trees import OracleProposer, random_tree, true_path
from tests.unit.models.tiny import CONFIGS, VOCAB_SIZE, text, tiny_model, tiny_target

NAMES = list(CONFIGS)
PRECISIONS = ["float32", "packed16", "bfloat16"]
PROMPT = text(19)
TEXT = text(24, seed=3)
VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())


def of_chains(chains: int, width: int) -> PassShape:
    return PassShape(width, chains, prefill_rows=8, capacity_step=64)


@lru_cache(maxsize=64)
def target_of(name: str, precision: str, chains: int = 2, width: int = 4) -> TransformersTarget:
    return tiny_target(name, precision, of_chains(chains, width))


def plain_scores(target, ids) -> torch.Tensor:
    """Logits after the prompt and after each of these ids, one pass each. [S, V]"""
    session, rows = target.open(PROMPT, 40, "reproducible"), []
    for token in [PROMPT[-1], *ids]:
        rows.append(session.score(DraftTree.empty(token))[0])
        session.keep((0,))
    return torch.stack(rows)


def check_bits(target, rng, following=TEXT, *, num_strays: int = 0) -> int:
    """Decode a text through random trees; returns how many true paths did not lie in the first row.

    Args:
        num_strays: nodes of each tree, true or not, that are also scored by themselves.
    """
    plain_SV = plain_scores(target, following)
    session, at, num_elsewhere = target.open(PROMPT, 40, "reproducible"), 0, 0
    limits = target.limits("reproducible")
    while at < len(following):
        draft = random_tree(rng, [PROMPT[-1], *following][at], following[at:], limits, VOCAB_SIZE)
        scores_NV = session.score(draft)
        nodes = true_path(draft, following[at:])
        assert torch.equal(scores_NV[nodes], plain_SV[at : at + len(nodes)])
        for node in rng.permutation(len(draft))[:num_strays]:
            path = path_to(draft, int(node))
            assert torch.equal(scores_NV[node], plain_scores(target, [*following[:at], *path])[-1])
        num_kept = int(rng.integers(1, len(nodes) + 1))
        num_elsewhere += nodes[num_kept - 1] not in (0, *first_row(draft))
        session.keep(nodes[:num_kept])
        at += num_kept
    return num_elsewhere


def path_to(draft: DraftTree, node: int) -> list[int]:
    """Tokens from below the root to the node."""
    return [*path_to(draft, draft.parents[node]), draft.tokens[node]] if node else []


def first_row(draft: DraftTree) -> list[int]:
    """The nodes above and at the first leaf."""
    nodes = list(draft.leaves[:1])
    while nodes and nodes[-1]:
        nodes.append(draft.parents[nodes[-1]])
    return nodes


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama", "float32"),
        ("qwen2", "packed16"),
        ("gemma3", "bfloat16"),
        ("mistral", "float32"),
        ("gemma3", "packed16"),
    ],
)
def test_every_node_of_any_tree_has_the_bits_of_plain_decoding(name, precision):
    assert check_bits(target_of(name, precision), np.random.default_rng(1)) >= 2


@settings(max_examples=6)
@given(
    name=st.sampled_from(NAMES),
    precision=st.sampled_from(PRECISIONS),
    shape=st.sampled_from([(2, 4), (3, 3), (4, 2), (1, 6)]),
    seed=st.integers(0, 10_000),
)
def test_bits_hold_for_any_shape_tree_and_pattern_of_acceptance(name, precision, shape, seed):
    check_bits(target_of(name, precision, *shape), np.random.default_rng(seed), TEXT[:6], num_strays=1)


@pytest.mark.parametrize(("name", "temperature"), [("llama", 0.0), ("gemma3", 0.7), ("llama", 1.0)])
def test_texts_drafted_as_trees_are_those_of_plain_decoding(name, temperature):
    target = target_of(name, "bfloat16", 3, 4)
    decoder = Decoder(target, VOCABULARY)
    request = Request(tuple(PROMPT), (), 40, Sampling(temperature), seed=4, num_draft_tokens=9, mode="reproducible")
    plain = emitted(decoder.decode(request, None))
    for seed in range(3):
        proposer = OracleProposer(plain, target.limits("reproducible"), VOCAB_SIZE, seed)
        steps = list(decoder.decode(request, proposer))
        assert emitted(steps) == plain
        assert len(steps) < 35
        assert proposer.num_branched > 5


def test_the_limits_are_those_of_the_batch():
    target = target_of("llama", "float32", 3, 4)
    assert target.limits("reproducible") == TreeLimits(9, num_chains=3, depth=3)
    session = target.open(PROMPT, 10, "reproducible")
    for parents in ([0, 0, 0, 0, 0], [0, 0, 1, 2, 3]):
        with pytest.raises(ContractError, match="num_chains=3, depth=3"):
            session.score(tree(range(5), parents))


def test_the_fingerprint_names_the_number_of_chains():
    assert target_of("llama", "float32", 2).fingerprint != target_of("llama", "float32", 3).fingerprint


# ---------------------------------------------------------------- planted bugs


class Trusting(TransformersTarget):
    """Does not look for itself whether its bits hold."""

    def self_test(self, capacity):
        pass


class RowsOnTheirOwn(Trusting):
    """Planted: the winner's keys stay in its row."""

    def open(self, *args):
        session = super().open(*args)
        session.backend.spread = lambda row, start, count: None
        return session


class FirstRowWins(Trusting):
    """Planted: the first row's keys are copied, whichever row won."""

    def open(self, *args):
        session = super().open(*args)
        spread = session.backend.spread
        session.backend.spread = lambda row, start, count: spread(0, start, count)
        return session


class OtherRow(TransformersTarget):
    """Planted: a node is read from another row than its own."""

    def compute(self, *args):
        return super().compute(*args).flip(0)


class TrustingOtherRow(OtherRow, Trusting):
    """The same, past the self-test."""


class LooksAtOtherRows(TransformersTarget):
    """Planted: logits depend a little on what the last row holds."""

    def compute(self, slots, ids_BS, positions_S, sees_SC, num_logits):
        return super().compute(slots, ids_BS, positions_S, sees_SC, num_logits) + 1e-6 * ids_BS[-1][1]


def planted(kind) -> TransformersTarget:
    return kind(tiny_model("llama"), of_chains(2, 4), name="x", precision="float32")


@pytest.mark.parametrize("kind", [RowsOnTheirOwn, FirstRowWins, TrustingOtherRow])
def test_wrong_rows_are_noticed_by_the_check_of_bits(kind):
    check_bits(planted(Trusting), np.random.default_rng(1))
    with pytest.raises(AssertionError):
        check_bits(planted(kind), np.random.default_rng(1))


@pytest.mark.parametrize("kind", [OtherRow, LooksAtOtherRows])
def test_the_self_test_refuses_rows_that_are_not_independent(kind):
    with pytest.raises(ConfigError, match="chains 2, width 4"):
        planted(kind).open(PROMPT, 10, "reproducible")
