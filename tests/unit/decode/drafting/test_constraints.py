"""Drafting under constraints: the text stays the target's own, no row is wasted on what cannot be drawn, and what is
forced is drafted without asking anybody."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.grammar_compiler import CompiledGrammar
from omnidraft.errors import RequestError
from omnidraft.ports import DraftTree, Grammar, Sampling, Source, TreeLimits
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from tests.unit.decode.drafting.constrained import (
    AS_SCHEMA,
    DRAFT_PIECES,
    EOS,
    GRAMMARS,
    TABLE,
    TARGET,
    TARGET_PIECES,
    Bushy,
    T,
    UnawareProposer,
    allowed_after,
    decoded,
    drafted_nodes,
    drafting,
    perfect,
    request,
    tokens_per_pass,
)
from tests.unit.decode.toys import NOISE, RandomTrees, Strict, emitted, table_of

REGEX = Grammar("regex", r"[a-z ]{60,100}")
PATTERNS = [r"[a-c]{2,5}-\d+", r"(ab|true)+", r"head(line|er)s?\n?", r"x?", r"[^a-z]{1,30}"]
GRAMMARS_TRIED = [None, AS_SCHEMA, *(Grammar("regex", pattern) for pattern in PATTERNS)]
NO_SOURCES = TreeProposer((), lambda mode: FixedPolicy())
ANY_SAMPLING = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0]),
    top_k=st.sampled_from([None, 1, 5]),
    top_p=st.sampled_from([None, 0.5, 0.95]),
    min_p=st.sampled_from([None, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 1.0]),
    logit_bias=st.dictionaries(
        st.integers(0, len(TARGET_PIECES) - 1), st.sampled_from([-100.0, -2.0, 5.0]), max_size=4
    ),
    grammar=st.sampled_from(GRAMMARS_TRIED),
)


def tree_of(proposer: TreeProposer, grammar: Grammar, said: bytes = b"", *, temperature: float = 0.0, limit: int = 9):
    """The tree that is drafted after these bytes of an answer, in single tokens where there are no longer ones."""
    sampling = GRAMMARS.prepared(Sampling(temperature, grammar=grammar))
    session = proposer.open(request(sampling))
    position = len(session.request.prompt_ids)
    if said:
        session.observe(TARGET.encode(said.decode()))
    return session.propose(position + len(TARGET.encode(said.decode())), TreeLimits(limit), NOISE)


def spelled(tree: DraftTree, source: Source | None = None) -> bytes:
    return TARGET.vocabulary.spell(
        token for token, of in zip(tree.tokens[1:], tree.sources[1:], strict=True) if source in (None, of)
    )


# ---------------------------------------------------------------- the text


@settings(max_examples=25)
@given(ANY_SAMPLING, st.integers(0, 2**32), st.integers(0, 99), st.booleans(), st.booleans(), st.integers(1, 9))
def test_the_text_is_the_targets_own_under_any_settings(sampling, seed, table_seed, is_bushy, has_lookup, num_draft):
    table = ToyTable.random(len(DRAFT_PIECES), table_seed)
    proposer = drafting(table=table, policy=Bushy() if is_bushy else None, has_lookup=has_lookup)
    decode_request = request(sampling, seed=seed, num_draft_tokens=num_draft, max_new_tokens=40)
    steps = decoded(decode_request, proposer)
    assert emitted(steps) == emitted(decoded(decode_request, None))
    for each in drafted_nodes(steps):
        assert EOS not in each.before
        assert sampling.logit_bias.get(each.token, 0.0) > -100
        if sampling.grammar is not None:
            assert each.token in allowed_after(sampling.grammar, each.before)


@settings(max_examples=15)
@given(st.sampled_from(GRAMMARS_TRIED[1:]), st.integers(0, 2**32), st.integers(0, 2**32))
def test_a_cursor_that_went_anywhere_allows_what_the_targets_matcher_allows(grammar, seed, tree_seed):
    """Paths are tried in any order, and the text goes on in between."""
    from omnidraft.decode.sampling.grammar_cursor import GrammarCursor

    compiled = GRAMMARS.compile(grammar).compiled
    assert isinstance(compiled, CompiledGrammar)
    cursor, answer = GrammarCursor(compiled, frozenset({EOS})), []
    for step in decoded(request(Sampling(1.0, grammar=grammar), seed=seed), RandomTrees(tree_seed, len(TARGET_PIECES))):
        for path in [(), *(step.emitted[:num] for num in (3, 1, 2) if EOS not in step.emitted[:num])]:
            allowed = allowed_after(grammar, [*answer, *path])
            assert {token for token in range(len(TARGET_PIECES)) if cursor.allows(path, token)} == allowed
            assert set(cursor.allowed(path, len(TARGET_PIECES)).nonzero()[0].tolist()) == allowed
            assert cursor.only_token(path) in (None, *(allowed if len(allowed) == 1 else ()))
        answer += step.emitted
        cursor.advance(step.emitted)
        if EOS in answer:
            break


class SharedGrammar(CompiledGrammar):
    """Planted: drafting gets no copy of its own, but the state of the target's draws."""

    def copy(self) -> "CompiledGrammar":
        return self


class Sharing(Grammars):
    """Planted: see SharedGrammar."""

    def compile(self, grammar: Grammar, **scope: Any) -> Grammar:
        compiled = super().compile(grammar, **scope).compiled
        assert isinstance(compiled, CompiledGrammar)
        is_shared = isinstance(compiled, SharedGrammar)
        return replace(
            grammar,
            compiled=compiled
            if is_shared
            else SharedGrammar(compiled.copy()._backend, grammar.kind, compiled._spelling),
        )


def own_text(grammars: Grammars) -> bool:
    decode_request = request(Sampling(1.0, grammar=REGEX), seed=4)
    decoder = Decoder(ToyTarget(TABLE), TARGET.vocabulary, failures=Strict(), grammars=grammars)
    try:
        return emitted(decoder.decode(decode_request, perfect())) == emitted(decoded(decode_request, None))
    except RequestError:  # a matcher that took tokens nobody drew may refuse everything
        return False


def test_planted_a_matcher_that_drafting_shares_with_the_text_is_seen():
    assert own_text(Grammars(TARGET.vocabulary))
    assert not own_text(Sharing(TARGET.vocabulary))


# ---------------------------------------------------------------- rows that count


@pytest.mark.parametrize(
    ("sampling", "unaware_at_most", "at_least"),
    [
        (Sampling(1.0, grammar=REGEX), 2.0, 5.0),
        (Sampling(0.0, grammar=Grammar("regex", "[0-9]{60,100}")), 2.0, 5.0),
        (Sampling(1.0, top_p=0.5), 3.5, 4.7),
        (Sampling(1.0, top_k=3), 3.5, 4.7),
        (Sampling(1.0, min_p=0.3), 3.5, 4.7),
        (Sampling(1.0, frequency_penalty=2.0), 4.9, 4.95),
        (Sampling(1.0, logit_bias={T[b"a"]: 6.0, T[b"b"]: 6.0, T[b"ab"]: -100.0}), 2.0, 5.0),
    ],
    ids=["regex", "regex, T = 0", "top-p", "top-k", "min-p", "frequency penalty", "bias"],
)
def test_a_perfect_drafter_stays_perfect_under_constraints(sampling, unaware_at_most, at_least):
    """Of six tokens a pass; unaware of its settings the same drafter gives the first number at most."""
    assert tokens_per_pass(sampling, UnawareProposer(perfect())) <= unaware_at_most
    assert tokens_per_pass(sampling, perfect()) >= at_least


def test_structured_output_takes_fewer_passes_without_any_memory():
    """A target that spells in long tokens and leaves no white space, as trained ones do, and a drafter that knows
    nothing: all that is gained comes from the grammar."""
    logits_SV = TABLE.logits_SV + 4.0 * torch.from_numpy(TARGET.vocabulary.num_bytes)
    logits_SV[:, [T[b" "], T[b"\n"]]] -= 50.0
    table, sampling = ToyTable(logits_SV, order=1), Sampling(0.0, grammar=AS_SCHEMA)
    aware, unaware = (tokens_per_pass(sampling, each, table) for each in (drafting(), UnawareProposer(drafting())))
    assert aware >= 1.6 * unaware


def test_the_next_allowed_candidates_take_the_place_of_a_forbidden_one_with_their_share_of_q():
    """The drafter is nearly sure of `z`, and only `a` and `b` are allowed."""
    after = ToyTable.random(len(DRAFT_PIECES), seed=3).logits_SV[:1]
    after[0, DRAFT_PIECES.index(b"z")] = 40.0
    tree = tree_of(
        drafting(table=ToyTable(after), policy=Bushy(), noise_weight=0.0), Grammar("regex", "[ab]{9}"), limit=60
    )
    firsts = [node for node in range(1, len(tree)) if tree.parents[node] == 0]
    assert {tree.tokens[node] for node in firsts} <= {T[b"a"], T[b"b"], T[b"ab"]}
    assert len(firsts) > 1
    assert sum(2.718281828 ** tree.log_q[node] for node in firsts) == pytest.approx(1.0, abs=0.05)


def test_a_draft_token_whose_later_pieces_are_forbidden_ends_there():
    """`true` is `tr`, `u`, `e` to the target."""
    table = table_of(len(DRAFT_PIECES), {}, DRAFT_PIECES.index(b"true"))
    tree = tree_of(drafting(table=table), Grammar("regex", r"[at]r[xu]x[a-z]*"))
    assert T[b"e"] not in tree.tokens
    assert tree.tokens[1:3] == (T[b"tr"], T[b"u"])


def test_of_draft_tokens_that_begin_alike_one_that_may_go_on_is_followed():
    """The drafter prefers `headl`, of which the target could take `head` alone, since a digit must follow."""
    logits = torch.zeros(1, len(DRAFT_PIECES))
    logits[0, DRAFT_PIECES.index(b"headl")], logits[0, DRAFT_PIECES.index(b"head")] = 9.0, 8.0
    tree = tree_of(drafting(table=ToyTable(logits)), Grammar("regex", r"[ah]ead[0-9]{5}"))
    assert tree.draft_ids[0] == DRAFT_PIECES.index(b"head")
    assert len(tree) > 4


def test_a_drafter_without_any_allowed_token_drafts_nothing():
    logits = ToyTable.random(len(DRAFT_PIECES), seed=3).logits_SV[:1] - 1e9
    logits[:] = float("-inf")
    logits[0, DRAFT_PIECES.index(b"z")] = 0.0
    assert len(tree_of(drafting(table=ToyTable(logits)), Grammar("regex", "[ab]{9}"))) == 1


def test_copies_from_the_prompt_end_where_the_grammar_forbids_the_next_token():
    tree = tree_of(drafting(has_lookup=True), Grammar("regex", r'ab "head[a-z]{9}'), b"ab ")
    assert b'"head' in spelled(tree)
    assert T[b'":'] not in tree.tokens


# ---------------------------------------------------------------- forced tokens


def test_forced_tokens_are_drafted_without_any_source():
    tree = tree_of(NO_SOURCES, Grammar("regex", "headline of 12"))
    assert spelled(tree).startswith(b"headline of ")
    assert set(tree.sources[1:]) == {Source.FORCED}
    assert tree.is_chain


def test_one_token_that_alone_is_allowed_is_certain():
    """`u` and `e`: no longer token begins with them."""
    session = NO_SOURCES.open(request(GRAMMARS.prepared(Sampling(0.0, grammar=Grammar("regex", "(true|false)")))))
    session.observe([T[b"tr"]])
    tree = session.propose(20, TreeLimits(9), NOISE)
    assert tree.tokens[1:] == (T[b"u"], T[b"e"], EOS)
    assert tuple(tree.acceptance[1:]) == (1.0, 1.0, 1.0)


def test_bytes_that_have_several_spellings_are_not_certain_and_their_acceptance_is_learned():
    """A target that always spells `head` in letters."""
    table = table_of(len(TARGET_PIECES), {T[b"h"]: T[b"e"], T[b"e"]: T[b"a"], T[b"a"]: T[b"d"]}, T[b"h"])
    proposer = TreeProposer((), lambda mode: FixedPolicy())
    grammar = Grammar("regex", "(head)+")
    before = tree_of(proposer, grammar)
    decoded(request(Sampling(0.0, grammar=grammar), num_draft_tokens=1), proposer, table)
    after = tree_of(proposer, grammar)
    assert after.sources[1] is before.sources[1] is Source.FORCED
    assert after.acceptance[1] < before.acceptance[1] < 1.0
    assert after.acceptance[1] < 0.6


def test_the_end_is_drafted_where_nothing_else_may_follow():
    tree = tree_of(NO_SOURCES, Grammar("regex", "ab"), b"ab")
    assert tree.tokens[1:] == (EOS,)
    assert tree.sources[1] is Source.FORCED
    assert EOS not in tree_of(NO_SOURCES, Grammar("regex", "ab+"), b"ab").tokens


def test_the_drafter_goes_on_behind_forced_tokens_in_the_same_round():
    """`headline` is `head`, `line` to the target and `headl`, `in`, `e` to the drafter, which then says `7`."""
    table = table_of(len(DRAFT_PIECES), {DRAFT_PIECES.index(b"e"): DRAFT_PIECES.index(b"7")}, DRAFT_PIECES.index(b"z"))
    tree = tree_of(drafting(table=table), Grammar("regex", r"headline[0-9]{3,9}"), limit=4)
    assert spelled(tree).startswith(b"headline7")
    assert tree.sources[1:4] == (Source.FORCED, Source.FORCED, Source.DIRECT)
    assert [DRAFT_PIECES[token] for token in tree.draft_ids[:4]] == [b"headl", b"in", b"e", b"7"]


def test_the_drafter_goes_on_behind_tokens_that_its_own_guess_forces():
    """After `7` comes `headline`, read in one step, and then what the drafter says."""
    pieces = {b"e": b"8", b"z": b"7", b" ": b"7"}
    after = {DRAFT_PIECES.index(last): DRAFT_PIECES.index(token) for last, token in pieces.items()}
    table = table_of(len(DRAFT_PIECES), after, DRAFT_PIECES.index(b"z"))
    tree = tree_of(drafting(table=table), Grammar("regex", r"([0-9]headline)+"), limit=6)
    assert spelled(tree).startswith(b"7headline8headline"[: len(spelled(tree))])
    assert Source.FORCED in tree.sources
    assert tree.sources.count(Source.DIRECT) == 2


def test_a_small_context_is_never_overrun_by_what_is_forced():
    """The toy drafter raises when it is fed beyond its context."""
    grammar = Grammar("regex", r"(headline of headlines: [0-9]+\n){2,4}")
    for context_limit in (1, 3, 8, 17, 40):
        for policy in (None, Bushy()):
            decode_request = request(Sampling(1.0, grammar=grammar))
            steps = decoded(decode_request, drafting(context_limit=context_limit, policy=policy))
            assert emitted(steps) == emitted(decoded(decode_request, None))


# ---------------------------------------------------------------- failures, and kinds of work


def test_after_a_failure_the_text_is_followed_from_its_beginning():
    proposer = drafting()
    session = proposer.open(request(GRAMMARS.prepared(Sampling(0.0, grammar=AS_SCHEMA))))
    session.observe([T[b'{"']])
    before = session.propose(20, TreeLimits(9), NOISE)
    session.reset()
    assert session.propose(20, TreeLimits(9), NOISE) == before
    assert spelled(before).startswith(b"headline")


def test_acceptance_and_noise_weight_are_counted_for_each_kind_of_request():
    proposer = drafting()
    (drafter,) = proposer.sources
    decoded(request(Sampling(1.0, grammar=AS_SCHEMA)), proposer)
    assert proposer.calibrators.of("default", "constrained")._counts
    assert not proposer.calibrators.of("default", "text")._counts
    assert {work for _, work in drafter.noise_coupling._num_agreed} == {"constrained"}
    decoded(request(Sampling(1.0)), proposer)
    assert proposer.calibrators.of("default", "text")._counts


def test_a_request_is_free_text_under_a_grammar_or_a_call_of_tools():
    free = request(Sampling())
    assert free.work == "text"
    assert request(Sampling(grammar=AS_SCHEMA)).work == "constrained"
    assert replace(free, has_tools=True).work == "tools"
