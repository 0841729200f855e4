"""A grammar begins behind the thoughts, a budget closes them, stop strings do not count in them, and no draft changes
a text."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.grammar_cursor import GrammarCursor
from omnidraft.decode.sampling.thought_gate import constraint_of
from omnidraft.decode.stop_checker import StopChecker
from omnidraft.ports import FinishReason, Grammar, Request, Sampling, Source, Step
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget, ToyTokenizer
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from omnidraft.vocab.thoughts import MAX_BLANK, Phase, ThoughtMarkers, Thoughts
from tests.unit.decode.drafting.constrained import AS_SCHEMA, Bushy
from tests.unit.decode.toys import RandomTrees, Strict, TableProposer, emitted

MARKED = [b"<think>", b"</think>", b"</", b">\n", b">{", b"think", b"</thi", b"\n\n"]
PIECES = [b"", b"", *(bytes([byte]) for byte in range(32, 127)), b'{"', b'": ', b'", "', b"head", b"line", *MARKED]
EOS = 1
STOPS = frozenset({EOS})
T = {piece: token for token, piece in enumerate(PIECES) if piece}
TOKENIZER = ToyTokenizer(PIECES, {"unk": 0, "eos": EOS})
GRAMMARS = Grammars(TOKENIZER.vocabulary)
MARKERS = ThoughtMarkers(TOKENIZER.vocabulary, {}, "<think>", "</think>")
TABLE = ToyTable.random(len(PIECES), seed=11, order=1, num_states=256)
TABLE.logits_SV[:, T[b"</think>"]] += 3.0
TABLE.logits_SV[:, T[b"<think>"]] += 4.0
WORD = Grammar("regex", "[a-z]{3}")


def request(
    phase: Phase = Phase.THOUGHTS,
    grammar: Grammar | None = AS_SCHEMA,
    *,
    budget: int | None = None,
    temperature: float = 1.0,
    markers: ThoughtMarkers = MARKERS,
    **fields: Any,
) -> Request:
    thoughts = Thoughts(markers, phase, grammar is not None, budget)
    sampling = GRAMMARS.prepared(Sampling(temperature, grammar=grammar))
    defaults = {"max_new_tokens": 120, "num_draft_tokens": 7, "mode": "fast", "stop_ids": STOPS, "thoughts": thoughts}
    return Request((5, 6), (5, 6), sampling=sampling, **(defaults | fields))


def decoded(decode_request: Request, proposer: Any = None, table: ToyTable = TABLE) -> list[Step]:
    decoder = Decoder(ToyTarget(table), TOKENIZER.vocabulary, failures=Strict())
    return list(decoder.decode(decode_request, proposer))


def text_of(steps: Sequence[Step]) -> str:
    return "".join(step.text for step in steps)


def tree_drafter() -> TreeProposer:
    """The real proposer of bushy trees, whose drafter is the target itself."""
    vocabulary, alignment = TOKENIZER.vocabulary, align(TOKENIZER, TOKENIZER)
    cache = NgramCache(alignment.fingerprint, vocabulary, vocabulary, 64)
    source = Drafter(ToyDrafter(TABLE), TOKENIZER, vocabulary, alignment, cache, NoiseCoupling((1.0,)))
    return TreeProposer((source,), lambda mode: Bushy())


PROPOSERS = {
    "real": tree_drafter,
    "good tree": lambda: TableProposer(TABLE, width=2),
    "hostile": lambda: RandomTrees(5, len(PIECES)),
}


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def next_after(decode_request: Request, ids: Sequence[int]) -> set[int]:
    matcher = Decoder(ToyTarget(TABLE), TOKENIZER.vocabulary, grammars=GRAMMARS).matcher(decode_request)
    assert matcher is not None
    for token in ids:
        matcher.take(token)
    logits = np.zeros(len(PIECES))
    matcher.apply(logits)
    return set(np.flatnonzero(logits > -np.inf).tolist())


def pieces(tokens: set[int]) -> set[bytes]:
    return {PIECES[token] for token in tokens}


BLANKS = {b" ", b"\n\n"}


def test_the_grammar_begins_behind_the_thoughts() -> None:
    thinking = request(Phase.THOUGHTS, WORD)
    everything = set(range(len(PIECES))) - STOPS
    assert next_after(thinking, ids_of("any 5 {text}")) == everything
    letters = {bytes([byte]) for byte in range(97, 123)}
    assert pieces(next_after(thinking, ids_of("x</think>"))) == letters | BLANKS
    assert pieces(next_after(thinking, ids_of("x</think>ab"))) == letters
    assert pieces(next_after(thinking, ids_of("x</think>\n\n abc"))) == {b""}
    assert pieces(next_after(request(Phase.CONTENT, WORD), [])) == letters


def test_a_model_that_thinks_when_it_wants_to_may_answer_at_once() -> None:
    undecided = request(Phase.LEAD, WORD)
    letters = {bytes([byte]) for byte in range(97, 123)}
    assert pieces(next_after(undecided, [])) == letters | BLANKS | {b"<think>", b"<"}
    assert pieces(next_after(undecided, ids_of("a"))) == letters
    assert next_after(undecided, [T[b"<think>"]]) == set(range(len(PIECES))) - STOPS
    spelled = [T[b"<"], T[b"t"], T[b"h"]]
    assert pieces(next_after(undecided, spelled)) == {b"i"}
    again = next_after(undecided, ids_of("<think>x</think>"))
    assert pieces(again) == letters | BLANKS  # none come behind others


def test_a_grammar_may_begin_as_the_marker_does() -> None:
    tagged = request(Phase.LEAD, Grammar("regex", r"<th[a-z]+>5"))
    assert b"a" in pieces(next_after(tagged, [T[b"<"], T[b"t"], T[b"h"]]))
    assert next_after(tagged, [T[b"<"], T[b"think"], T[b">"]]) == set(range(len(PIECES))) - STOPS
    assert pieces(next_after(tagged, [T[b"<"], T[b"t"], T[b"h"], T[b"e"], T[b">"]])) == {b"5"}


def test_a_token_that_closes_the_thoughts_and_goes_on_is_no_way_around_the_grammar() -> None:
    spelled = [T[b"</thi"], T[b"n"], T[b"k"]]
    allowed = pieces(next_after(request(Phase.THOUGHTS, WORD), spelled))
    assert {b">", b">\n", b"k", b"<think>"} <= allowed
    assert b">{" not in allowed
    assert b">{" in pieces(next_after(request(Phase.THOUGHTS, None, budget=99), spelled))


def test_white_space_before_the_content_has_a_bound() -> None:
    blanks = ids_of(" " * MAX_BLANK)
    assert BLANKS.isdisjoint(pieces(next_after(request(Phase.THOUGHTS, WORD), [*ids_of("</think>"), *blanks])))


def test_a_used_up_budget_leaves_the_closing_marker_alone() -> None:
    begun = ids_of("abc")
    limited = request(Phase.THOUGHTS, WORD, budget=3)
    assert len(next_after(limited, begun[:2])) > 1
    assert pieces(next_after(limited, begun)) == {b"</think>"}
    assert pieces(next_after(limited, [*begun[:2], T[b"</thi"]])) == {b"n"}
    assert pieces(next_after(request(Phase.LEAD, None, budget=0), [T[b"<think>"]])) == {b"</think>"}
    assert len(next_after(request(Phase.LEAD, None, budget=0), ids_of("<think></think>"))) == len(PIECES)


def reaches_across(steps: Sequence[Step]) -> bool:
    """Whether a step accepted drafts on both sides of the closing marker."""
    return any(T[b"</think>"] in step.emitted[1 : len(step.path)] for step in steps)


@pytest.mark.parametrize("kind", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_text(kind: str, temperature: float) -> None:
    num_across = num_closed = 0
    for seed in range(2):
        for phase, budget in [(Phase.THOUGHTS, None), (Phase.THOUGHTS, 6), (Phase.LEAD, 6), (Phase.LEAD, None)]:
            grammar = AS_SCHEMA if seed else None
            asked = request(phase, grammar, budget=budget, temperature=temperature, seed=seed)
            steps = decoded(asked, PROPOSERS[kind]())
            assert emitted(steps) == emitted(decoded(asked))
            num_across += reaches_across(steps)
            said = text_of(steps)
            if grammar is not None and steps[-1].finish_reason is FinishReason.STOP:
                json.loads(said.partition("</think>")[2] if "</think>" in said else said)
                num_closed += "</think>" in said
            if budget is not None and phase is Phase.THOUGHTS:
                assert T[b"</think>"] in emitted(steps)[: budget + 1]
    assert num_closed
    assert num_across or kind != "real"


def test_what_a_budget_forces_is_drafted_without_asking_anybody() -> None:
    steps = decoded(request(Phase.THOUGHTS, None, budget=4), tree_drafter())
    drafted = [
        (tree.tokens[node], tree.sources[node])
        for tree in [each.tree for each in steps]
        for node in range(1, len(tree))
    ]
    assert (T[b"</think>"], Source.FORCED) in drafted


@settings(max_examples=40)
@given(st.data())
def test_a_cursor_that_went_anywhere_allows_what_the_matcher_allows(data: st.DataObject) -> None:
    """Paths across all borders are tried in any order, and the text goes on in between."""
    phase, grammar = (
        data.draw(st.sampled_from([Phase.THOUGHTS, Phase.LEAD])),
        data.draw(st.sampled_from([None, WORD, AS_SCHEMA])),
    )
    asked = request(
        phase,
        grammar,
        budget=data.draw(st.sampled_from([None, 0, 2, 5])),
        markers=data.draw(st.sampled_from([MARKERS, RETURNING])),
    )
    constraint = constraint_of(asked.sampling.grammar, asked.thoughts)
    if constraint is None:
        return
    cursor, said = GrammarCursor(constraint, STOPS), list[int]()
    for _ in range(3):
        paths = []
        for _ in range(3):
            path: list[int] = []
            for _ in range(data.draw(st.integers(0, 7))):
                likely = [token for token in LIKELY if cursor.allows(path, token)]
                if not likely:
                    break
                path.append(data.draw(st.sampled_from(likely)))
            paths.append(path)
        for path in paths:
            allowed = next_after(asked, [*said, *path])
            assert {token for token in range(len(PIECES)) if cursor.allows(path, token)} == allowed
            assert set(cursor.allowed(path, len(PIECES)).nonzero()[0].tolist()) == allowed
            assert cursor.only_token(path) in (None, *(allowed if len(allowed) == 1 else ()))
        for path in paths:
            assert cursor.allows_all([], path)
        said += paths[0]
        cursor.advance(paths[0])


RETURNING = ThoughtMarkers(TOKENIZER.vocabulary, {}, "<think>", "</think>", may_return=True)
LIKELY = [T[each] for each in (*MARKED, b"<", b"t", b"h", b"i", b"n", b"k", b">", b"{", b'{"', b"a", b"b", b" ")]


def test_stop_strings_count_behind_the_thoughts() -> None:
    def ended(text: str, phase: Phase, stop: bytes) -> str:
        """What is shown up to the stop."""
        checker = StopChecker(request(phase, None, stop_strings=(stop,)), TOKENIZER.vocabulary)
        shown = ""
        for token in ids_of(text):
            is_over = checker.ends(token)
            shown += checker.take()
            if is_over:
                break
        return shown

    assert ended("a.b</think>c.d", Phase.THOUGHTS, b".") == "a.b</think>c"
    assert ended("<think>a.b</think>c.d", Phase.LEAD, b".") == "<think>a.b</think>c"
    assert ended("<think>a</think>\n\nb\n\nc", Phase.LEAD, b"\n\n") == "<think>a</think>\n\nb"
    assert ended("<think>a</think>b", Phase.LEAD, b"<") == "<think>a</think>b"
    assert ended("<thin>a", Phase.LEAD, b"<thin>") == ""
    assert ended("a.b", Phase.CONTENT, b".") == "a"
    assert ended("a</think>b", Phase.THOUGHTS, b">b") == "a</think>b"


def test_a_preempted_text_goes_on_where_it_was() -> None:
    asked = request(Phase.THOUGHTS, budget=9, seed=3)
    decoder = Decoder(ToyTarget(TABLE), TOKENIZER.vocabulary, failures=Strict())
    sequence, ids = decoder.add(asked, tree_drafter()), list[int]()
    while not sequence.is_finished:
        steps = [output.step for output in decoder.step() if output.step is not None]
        ids += emitted(steps)
        if steps and not sequence.is_finished:
            decoder.scheduler.preempt(sequence)
    assert ids == emitted(decoded(asked))
