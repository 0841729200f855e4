"""The drafter's chain in the target's tokens: translation, its own context, its cache, its limits."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
from omnidraft.ports import Sampling, Source, TreeLimits
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.retokenise import TailTokeniser, map_special_ids, retokenise, runs
from tests.unit.decode.checks import spied
from tests.unit.decode.drafting.constrained import Bushy
from tests.unit.decode.toys import (
    ALIGNMENT,
    DRAFT_EOS,
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    NOISE,
    TABLE,
    TARGET_EOS,
    TARGET_PIECES,
    TARGET_TOKENIZER,
    D,
    T,
    emitted,
    make_cache,
    make_drafter,
    make_request,
    slow_decode,
    table_of,
    toy_decoder,
)


def drafter_that_says(*pieces: bytes) -> ToyTable:
    """After the prompt's newline these pieces, then always a space."""
    after, last = {}, D[b"\n"]
    for piece in pieces:
        after[last] = D[piece]
        last = D[piece]
    return table_of(len(DRAFT_PIECES), after, D[b" "])


def chain(num_nodes: int) -> TreeLimits:
    return TreeLimits(num_nodes, num_chains=1)


def tree_of(proposer, budget=3, position=8, **fields):
    session = proposer.open(make_request(Sampling(0.0), **fields))
    return session.propose(position, chain(budget), NOISE)


def test_a_token_both_have_is_sent_as_it_is():
    tree = tree_of(make_drafter(drafter_that_says(b"a", b"d", b"f")))
    assert tree.tokens[1:] == (T[b"a"], T[b"d"], T[b"f"])
    assert tree.sources[1:] == (Source.DIRECT,) * 3
    assert tree.draft_ids == (D[b"a"], D[b"d"], D[b"f"])
    assert tree.tokens[0] == make_request().prompt_ids[-1]
    assert tree.is_chain


def test_a_token_the_target_lacks_is_split_as_the_target_spells_it():
    tree = tree_of(make_drafter(drafter_that_says(b"abcd", b"g")))
    assert tree.tokens[1:] == (T[b"abc"], T[b"d"], T[b"g"])
    assert tree.sources[1:] == (Source.SPLIT, Source.SPLIT, Source.DIRECT)
    assert tree.log_q[2] == 0.0


def test_tokens_the_cache_knows_together_are_merged():
    cache = make_cache()
    cache.insert((D[b"h"], D[b"e"]), T[b"he"])
    tree = tree_of(make_drafter(drafter_that_says(b"h", b"e", b"g"), cache=cache))
    assert tree.tokens[1:] == (T[b"he"], T[b"g"], T[b" "])
    assert tree.sources[1:3] == (Source.MERGE, Source.DIRECT)
    assert len(tree.draft_ids) == 4
    direct = tree_of(make_drafter(drafter_that_says(b"h", b"e", b"g")))
    assert tree.log_q[1] == pytest.approx(direct.log_q[1] + direct.log_q[2])


def test_probability_counts_every_draft_token_that_begins_with_the_same_target_token():
    """`bc` is split into b, c and `b` is direct: together they outweigh the single likeliest token."""
    logits = torch.full((1, len(DRAFT_PIECES)), -20.0)
    for piece, p in {b"b": 0.3, b"bc": 0.3, b"g": 0.4}.items():
        logits[0, D[piece]] = math.log(p)
    tree = tree_of(make_drafter(ToyTable(logits)), budget=1)
    assert tree.tokens[1] == T[b"b"]
    assert tree.log_q[1] == pytest.approx(math.log(0.6), abs=1e-4)


def test_a_drafter_whose_mass_is_all_unmapped_drafts_nothing():
    logits = torch.full((1, len(DRAFT_PIECES)), -math.inf)
    logits[0, D[b"x"]] = 0.0
    for temperature in (0.0, 1.0):
        session = make_drafter(ToyTable(logits), noise_weight=1.0).open(make_request(Sampling(temperature)))
        assert len(session.propose(8, chain(4), NOISE)) == 1


def test_special_tokens_go_by_role_only():
    """The ends of both texts mean each other, whatever their ids; the end of a text ends a chain."""
    table = table_of(len(DRAFT_PIECES), {D[b"\n"]: D[b"a"], D[b"a"]: DRAFT_EOS}, D[b"b"])
    tree = tree_of(make_drafter(table), budget=5, stop_ids=frozenset({TARGET_EOS}))
    assert tree.tokens[1:] == (T[b"a"], TARGET_EOS)
    user = tree_of(make_drafter(table_of(len(DRAFT_PIECES), {}, 1)))
    assert not {0, TARGET_EOS} & set(user.tokens)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 9), st.sampled_from([0.0, 0.2]), st.booleans())
def test_a_chain_keeps_to_its_budget_and_every_answer_is_that_of_a_fresh_drafter(seed, budget, floor, is_coupled):
    """Keys cut back to the common prefix change no answer; the drafter's text is the target's, re-tokenised."""
    proposer, spy = spied(
        make_drafter(
            ToyTable.random(len(DRAFT_PIECES), seed),
            noise_weight=float(is_coupled),
            min_path_probability=floor,
        )
    )
    request = make_request(seed=seed, num_draft_tokens=budget)
    steps = list(toy_decoder().decode(request, proposer))
    assert all(len(step.tree) - 1 <= budget for step in steps)
    whole = TailTokeniser(DRAFT_TOKENIZER, request.drafter_prompt_ids)
    for is_special, run in runs(emitted(steps[:-1]), TARGET_TOKENIZER.vocabulary):
        if is_special:
            whole.append_special(map_special_ids(run, ALIGNMENT))
        else:
            whole.append(TARGET_TOKENIZER.vocabulary.spell(run))
    if spy.texts and not whole.pending and len(steps[-1].tree) > 1:
        num_drafted = len(steps[-1].tree.draft_ids)
        assert spy.texts[-1] == [*whole.ids, *steps[-1].tree.draft_ids[: num_drafted - 1]]


def test_the_text_that_stayed_is_not_fed_again():
    proposer, spy = spied(make_drafter(drafter_that_says(b"a", b"d", b"f", b"g")))
    session = proposer.open(make_request(Sampling(0.0)))
    session.propose(8, chain(3), NOISE)
    session.observe([T[b"a"], T[b"d"], T[b"f"], T[b"g"]])
    del spy.sent[:]
    session.propose(12, chain(1), NOISE)
    assert spy.sent == [D[b"a"], D[b"d"], D[b"f"], D[b"g"]]


class Interrupted(ToyDrafter):
    """Ctrl-C is pressed in its next pass, where a test says so."""

    is_pressed = False

    def prefill_or_extend_all(self, requests):
        if self.is_pressed:
            self.is_pressed = False
            raise KeyboardInterrupt
        return super().prefill_or_extend_all(requests)


@pytest.mark.parametrize("num_rounds", [0, 1])
def test_keys_that_an_interrupted_pass_did_not_compute_serve_no_later_text(num_rounds):
    """The toy session raises when it is to keep ids that it has not read."""
    model, proposer = Interrupted(ToyTable.random(len(DRAFT_PIECES), seed=3)), make_drafter()
    [drafter] = proposer.sources
    proposer.sources = (replace(drafter, model=model),)
    request, said, position = make_request(Sampling(0.0)), [T[b"a"], T[b"d"], T[b"f"], T[b"g"]], 8
    interrupted, later, fresh = (each.open(request) for each in (proposer, proposer, make_drafter()))
    for _ in range(num_rounds):
        interrupted.propose(position, chain(3), NOISE)
        position += len(said)
        for each in (interrupted, later, fresh):
            each.observe(said)
    model.is_pressed = True
    with pytest.raises(KeyboardInterrupt):
        interrupted.propose(position, chain(3), NOISE)
    interrupted.close()
    trees = [each.propose(position, chain(3), NOISE) for each in (later, fresh)]
    assert trees[0].tokens == trees[1].tokens
    assert len(trees[0]) > 1


def test_half_a_character_drafts_nothing_until_it_is_whole():
    session = make_drafter().open(make_request(Sampling(0.0)))
    session.observe([T[b"e\xe2"]])
    assert len(session.propose(9, chain(4), NOISE)) == 1
    session.observe([T[b"\x82"]])
    assert len(session.propose(10, chain(4), NOISE)) == 1
    session.observe([T[b"\xac"]])
    tree = session.propose(11, chain(4), NOISE)
    assert len(tree) == 5
    assert tree.tokens[0] == T[b"\xac"]


def observe(session, pieces):
    """... and look at the text, as drafting does."""
    session.observe([T[piece] for piece in pieces])
    return session.sources[-1].context.ids


def test_merges_are_learned_from_what_the_target_emits_and_used_afterwards():
    """The drafter emits h, e; the target emits he. After the target emitted it once, the draft is one token."""
    cache = make_cache()
    proposer = make_drafter(drafter_that_says(b"h", b"e", b"g"), cache=cache)
    session = proposer.open(make_request(Sampling(0.0)))
    assert session.propose(8, chain(2), NOISE).tokens[1:] == (T[b"h"], T[b"e"])
    observe(session, [b"he", b"."])
    assert len(cache) == 0
    observe(session, [b"\n"])
    assert cache.lookup((D[b"h"], D[b"e"])) == T[b"he"]
    assert session.propose(11, chain(2), NOISE).tokens[1:] == (T[b"he"], T[b"g"])


def test_a_text_that_is_not_stored_teaches_the_cache_nothing():
    cache = make_cache()
    session = make_drafter(cache=cache).open(make_request(Sampling(0.0), is_stored=False))
    observe(session, [b"he", b"."])
    observe(session, [b"\n"])
    assert len(cache) == 0


def test_learning_survives_a_word_that_is_tokenised_otherwise_as_it_grows():
    """a, b are two draft tokens and learned from; with c, d behind them all four are one."""
    cache = make_cache()
    session = make_drafter(cache=cache).open(make_request(Sampling(0.0)))
    for pieces in ([b"a"], [b"b"], [b"cd", b"e"], [b"he"], [b"."], [b" a"], [b"."], [b"."]):
        observe(session, pieces)
    assert cache.lookup((D[b" "], D[b"a"])) == T[b" a"]


TARGET_UNK = 0
"""A special token without a partner."""
EMITTED = st.lists(st.sampled_from([*T.values(), TARGET_UNK, TARGET_EOS]), min_size=1, max_size=4)


def test_special_tokens_in_the_text_are_read_by_role_and_left_out_without_a_partner():
    session = make_drafter().open(make_request(Sampling(0.0)))
    context = session.sources[-1].context
    before = list(context.ids)
    session.observe([T[b"a"], TARGET_EOS, T[b"b"], TARGET_UNK, T[b"cd"]])
    assert context.ids == [*before, D[b"a"], DRAFT_EOS, D[b"b"], D[b"c"], D[b"d"]]


def test_a_special_token_ends_a_character_that_never_ended():
    session = make_drafter().open(make_request(Sampling(0.0)))
    context = session.sources[-1].context
    before = list(context.ids)
    session.observe([T[b"\xe2"]])
    assert context.ids is None
    session.observe([TARGET_EOS])
    assert context.ids == [*before, D[b"\xe2"], DRAFT_EOS]


def test_merges_before_and_behind_a_special_token_are_learned():
    cache = make_cache()
    session = make_drafter(cache=cache).open(make_request(Sampling(0.0)))
    session.observe([T[b"he"], TARGET_EOS, T[b" a"], TARGET_UNK, T[b"gh"], TARGET_EOS])
    assert session.sources[-1].context.ids is not None
    pairs = [(b"h", b"e"), (b" ", b"a"), (b"g", b"h")]
    assert [cache.lookup((D[left], D[right])) for left, right in pairs] == [T[left + right] for left, right in pairs]


@settings(max_examples=100)
@given(st.lists(EMITTED, max_size=15))
def test_a_text_that_grew_is_read_as_the_whole_text_is(steps):
    request = make_request(Sampling(1.0))
    session = make_drafter().open(request)
    for ids in steps:
        session.observe(ids)
        assert len(session.propose(9, chain(2), NOISE)) <= 3
    said = [token for ids in steps for token in ids]
    whole = retokenise(said, TARGET_TOKENIZER.vocabulary, DRAFT_TOKENIZER, ALIGNMENT)
    assert session.sources[-1].context.ids in (None, [*request.drafter_prompt_ids, *whole])


def test_a_head_that_is_asked_decides_where_a_chain_ends():
    """Each token has a probability of 0.8: four of them are 0.41, five 0.33, which is where 1 - 0.4 is passed."""
    table = drafter_that_says(b"a", b"d", b"f", b"g")
    proposer, spy = spied(make_drafter(table, policy=AcceptancePolicy(0.6), acceptance=lambda log_q: 0.8))
    tree = tree_of(proposer, budget=12)
    assert max(tree.depths) == 5
    assert len(spy.texts) == 5  # no step was spent behind the fifth


def test_a_merge_is_judged_where_it_begins_by_the_q_of_all_its_pieces():
    cache, seen_log_q = make_cache(), []
    cache.insert((D[b"h"], D[b"e"]), T[b"he"])
    table = table_of(len(DRAFT_PIECES), {D[b"\n"]: D[b"h"], D[b"h"]: D[b"e"]}, D[b"g"])
    proposer = make_drafter(
        table, cache=cache, policy=AcceptancePolicy(0.9), acceptance=lambda q: seen_log_q.append(round(q, 3)) or 0.9
    )
    session = proposer.open(make_request(Sampling(0.0)))
    tree = session.propose(8, TreeLimits(2), NOISE)
    assert T[b"he"] in tree.tokens
    sure = math.log(math.exp(9) / (math.exp(9) + len(DRAFT_PIECES) - 1))
    assert seen_log_q[:2] == pytest.approx([sure, 2 * sure], abs=2e-3)


def test_without_a_head_chains_end_by_measured_agreement():
    """With an acceptance head, and with one that the policy does not use."""
    table = ToyTable.random(len(DRAFT_PIECES), seed=5)

    def texts(policy, acceptance=None):
        decoder, proposer = toy_decoder(), make_drafter(table, policy=policy, acceptance=acceptance)
        return [step.tree for step in decoder.decode(make_request(seed=4, max_new_tokens=60), proposer)]

    measured = texts(ThresholdPolicy(0.25))
    assert texts(AcceptancePolicy(0.75)) == measured
    assert texts(ThresholdPolicy(0.25), acceptance=lambda log_q: 0.01) == measured
    assert texts(AcceptancePolicy(0.75), acceptance=lambda log_q: 0.01) != measured


@pytest.mark.parametrize("context_limit", [1, 2, 5, 9, 17])
@pytest.mark.parametrize("num_candidates", [1, 4])
def test_the_drafters_context_is_never_overrun(context_limit, num_candidates):
    """A toy drafter raises when it is fed beyond its context, all branches counted; merges feed more ids than they give
    tokens."""
    cache = make_cache()
    cache.insert((D[b"h"], D[b"e"]), T[b"he"])
    after = {D[b"\n"]: D[b"h"], D[b"h"]: D[b"e"]}
    proposer = make_drafter(
        table_of(len(DRAFT_PIECES), after, D[b"h"]),
        cache=cache,
        context_limit=context_limit,
        policy=Bushy() if num_candidates > 1 else None,
    )
    request = make_request(Sampling(0.0))
    steps = list(toy_decoder().decode(request, proposer))
    assert emitted(steps) == slow_decode(TABLE, request)
    assert all(len(step.tree.draft_ids) <= context_limit for step in steps)
    assert len(steps[-2].tree) > 1  # the last may have no space for a draft
    if num_candidates > 1 and context_limit > 9:
        assert any(len(step.tree.leaves) > 1 for step in steps)


def agreement(noise_weight: float, temperature: float) -> float:
    """Share of drafted tokens the target drew when the drafter is the target."""
    own = align(TARGET_TOKENIZER, TARGET_TOKENIZER)
    cache = NgramCache(own.fingerprint, TARGET_TOKENIZER.vocabulary, TARGET_TOKENIZER.vocabulary, 4)
    pieces = [index for index, piece in enumerate(TARGET_PIECES) if len(piece) == 1 and piece[0] < 128]
    table = ToyTable(TABLE.logits_SV.clone(), order=1)
    mask = torch.full_like(table.logits_SV, -math.inf)
    mask[:, pieces] = 0
    table = ToyTable(table.logits_SV + mask, order=1)
    weights = NoiseCoupling((noise_weight,))
    drafter = Drafter(ToyDrafter(table), _SingleBytes(), TARGET_TOKENIZER.vocabulary, own, cache, weights)
    proposer = TreeProposer((drafter,), lambda mode: FixedPolicy())
    decoder, drawn, drafted = Decoder(ToyTarget(table), TARGET_TOKENIZER.vocabulary), 0, 0
    for seed in range(6):
        request = make_request(Sampling(temperature), seed=seed, max_new_tokens=30)
        request = replace(request, drafter_prompt_ids=request.prompt_ids)
        for step in decoder.decode(request, proposer):
            drawn += len(step.path)
            drafted += min(len(step.path) + 1, len(step.tree) - 1)
    return drawn / drafted


class _SingleBytes:
    """The target's vocabulary, one token for each byte: as the target emits it here."""

    vocabulary = TARGET_TOKENIZER.vocabulary

    def encode(self, text: str) -> list[int]:
        return [T[bytes([byte])] for byte in text.encode()]

    def encode_batch(self, texts):
        return [self.encode(text) for text in texts]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_drafter_that_is_the_target_and_sees_its_noise_always_agrees(temperature):
    assert agreement(1.0, temperature) == 1.0
    assert agreement(0.0, temperature) < 0.9
