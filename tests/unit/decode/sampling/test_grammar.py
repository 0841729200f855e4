"""A text under a grammar: always matches, ends only where it may, and is the target's own, whoever drafts."""

import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Grammar, Request, Sampling
from omnidraft.testing.toy_models import ToyTable, ToyTarget, ToyTokenizer
from tests.unit.decode.toys import RandomTrees, TableProposer, emitted

LETTERS = [bytes([byte]) for byte in range(32, 127)]
PIECES = [b"", b"", *LETTERS, b'{"', b'":', b'", "', b"ab", b"true", b"12", b"\n", b"ab", b"\xe2", b"\x82", b"\xac"]
EOS = 1
TOKENIZER = ToyTokenizer(PIECES, {"unk": 0, "eos": EOS})
TABLE = ToyTable.random(len(PIECES), seed=11)
GRAMMARS = Grammars(TOKENIZER.vocabulary)
STOPS = frozenset({EOS})
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ab", "n"],
    "additionalProperties": False,
}
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))


def request(grammar: Grammar, temperature: float = 1.0, seed: int = 0, **fields: object) -> Request:
    defaults = {"max_new_tokens": 80, "num_draft_tokens": 6, "mode": "fast", "stop_ids": STOPS}
    return Request((5, 6), (), sampling=Sampling(temperature, grammar=grammar), seed=seed, **(defaults | fields))


def decoded(decode_request: Request, proposer=None, table=TABLE):
    return list(Decoder(ToyTarget(table), TOKENIZER.vocabulary).decode(decode_request, proposer))


def text_of(steps) -> str:
    return "".join(step.text for step in steps)


def allowed(grammar: Grammar, said: bytes, stops: frozenset[int] = STOPS) -> set[int]:
    """Ids that can be drawn after a text, said in single bytes."""
    matcher = GRAMMARS.matcher(grammar, stops)
    for byte in said:
        matcher.take(PIECES.index(bytes([byte])))
    logits = np.zeros(len(PIECES))
    matcher.apply(logits)
    return set(np.flatnonzero(logits > -np.inf).tolist())


def ids_of(*pieces: bytes) -> set[int]:
    return {token for token, piece in enumerate(PIECES) if piece in pieces}


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_finished_json_text_fits_its_schema(temperature):
    texts = [decoded(request(AS_SCHEMA, temperature, seed), RandomTrees(seed, len(PIECES))) for seed in range(4)]
    finished = [steps for steps in texts if steps[-1].finish_reason is FinishReason.STOP]
    assert finished
    for steps in finished:
        answer = json.loads(text_of(steps))
        assert set(answer) == {"ab", "n"}
        assert isinstance(answer["ab"], bool)
        assert 0 <= answer["n"] <= 99


INTEGER, NUMBER = {"type": "integer"}, {"type": "number"}


def of_field(schema: dict) -> dict:
    return {"type": "object", "properties": {"ab": schema}, "required": ["ab"], "additionalProperties": False}


ENDLESS = {
    "integer": of_field(INTEGER),
    "nullable": of_field({"type": ["integer", "null"]}),
    "lower bound": of_field(INTEGER | {"minimum": 5}),
    "multiple": of_field(INTEGER | {"multipleOf": 970}),
    "multiple of a number": of_field(NUMBER | {"multipleOf": 0.25}),
    "number": of_field(NUMBER),
    "bounded number": of_field(NUMBER | {"minimum": -4, "maximum": 4}),
    "array": of_field({"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 2}),
    "any of": of_field({"anyOf": [NUMBER, {"type": "null"}]}),
    "definition": {"$defs": {"n": NUMBER}} | of_field({"$ref": "#/$defs/n"}),
    "nested": of_field(of_field(NUMBER)),
    "any value": of_field({}),
    "by pattern": {
        "type": "object",
        "patternProperties": {"^ab$": INTEGER},
        "required": ["ab"],
        "additionalProperties": False,
    },
    "of any key": {"type": "object", "additionalProperties": NUMBER, "required": ["ab"]},
    "any object": {"type": "object"},
    "alone": INTEGER,
}


def answer_of(grammar: Grammar, *preferred: bytes, most: int = 400) -> str:
    """The text of a model that writes the first of these characters which may come next, and ends where none may."""
    matcher, said = GRAMMARS.matcher(grammar, STOPS), list[int]()
    order = [PIECES.index(each) for each in preferred] + [EOS, PIECES.index(b"}"), PIECES.index(b'"')]
    while EOS not in said:
        assert len(said) < most, b"".join(PIECES[token] for token in said)
        logits = np.zeros(len(PIECES))
        matcher.apply(logits)
        said.append(next(token for token in (*order, *range(len(PIECES))) if logits[token] == 0))
        matcher.take(said[-1])
    return b"".join(PIECES[token] for token in said).decode()


@pytest.mark.parametrize("preferred", [b"9", b"-1.0", b"1.e+0", b"1e-9", b" \n9", b"\n0", b"0.7"], ids=repr)
@pytest.mark.parametrize("schema", ENDLESS)
def test_no_model_writes_digits_or_space_for_ever(schema: str, preferred: bytes) -> None:
    grammar = Grammar("json_schema", json.dumps(ENDLESS[schema]))
    json.loads(answer_of(grammar, *(bytes([byte]) for byte in preferred)))


def test_an_integer_may_have_all_digits_of_one_of_64_bits() -> None:
    """Ids of messages have 19, and one that is cut is another's."""
    grammar = Grammar("json_schema", json.dumps(of_field(INTEGER)))
    assert json.loads(answer_of(grammar, b"9"))["ab"] == int("9" * 20)
    assert json.loads(answer_of(grammar, b"12", b"9"))["ab"] == int("12" * 10)


@pytest.mark.parametrize("pattern", ["^[0-9]+x$", "^[0-9]{30}$", "^[0-9]*$"])
def test_digits_of_a_string_are_bounded_by_its_own_schema_alone(pattern: str) -> None:
    grammar = Grammar("json_schema", json.dumps(of_field({"type": "string", "pattern": pattern})))
    digits = {token for token, piece in enumerate(PIECES) if piece.isdigit()}
    assert allowed(grammar, b'{"ab":"' + b"7" * 29) & digits


def test_drafts_do_not_change_where_a_number_ends() -> None:
    table = ToyTable.random(len(PIECES), seed=3)
    table.logits_SV[:, sorted(ids_of(*(b"%d" % digit for digit in range(10))))] += 20
    decode_request = request(Grammar("json_schema", json.dumps(of_field(NUMBER))), 1.0, 4)
    plain = decoded(decode_request, table=table)
    assert plain[-1].finish_reason is FinishReason.STOP
    json.loads(text_of(plain))
    for proposer in (RandomTrees(5, len(PIECES)), TableProposer(table, width=2)):
        assert emitted(decoded(decode_request, proposer, table)) == emitted(plain)


PATTERNS = [r"[a-c]{2,5}-\d+", r"(ab|true)+", "\u20ac{1,3}", r"a/b\n?", r"x?"]


@settings(max_examples=40)
@given(
    st.sampled_from(PATTERNS),
    st.integers(0, 2**32),
    st.integers(0, 2**63),
    st.sampled_from([0.0, 1.0]),
    st.integers(1, 9),
    st.integers(1, 40),
)
def test_any_tree_gives_the_text_of_plain_decoding_and_it_matches(
    pattern, trees, seed, temperature, budget, max_new_tokens
):
    decode_request = request(
        Grammar("regex", pattern), temperature, seed, num_draft_tokens=budget, max_new_tokens=max_new_tokens
    )
    plain = decoded(decode_request)
    for proposer in (RandomTrees(trees, len(PIECES)), TableProposer(TABLE, width=2)):
        steps = decoded(decode_request, proposer)
        assert emitted(steps) == emitted(plain)
        assert text_of(steps) == text_of(plain)
    if plain[-1].finish_reason is FinishReason.STOP:
        assert re.fullmatch(pattern, text_of(plain))


def test_every_spelling_is_left_to_the_target():
    """The library would force one; two ids with the same bytes are both allowed."""
    assert allowed(Grammar("regex", "ab!"), b"") == ids_of(b"a", b"ab")
    assert len(ids_of(b"ab")) == 2


def test_an_end_is_allowed_where_the_text_matches_and_only_there():
    grammar = Grammar("regex", "a+")
    assert allowed(grammar, b"") == ids_of(b"a")
    assert allowed(grammar, b"a") == ids_of(b"a") | STOPS
    assert allowed(Grammar("regex", "ab"), b"ab") == STOPS
    assert allowed(Grammar("regex", "ab"), b"ab", frozenset({0, EOS})) == {0, EOS}


def test_a_stop_id_that_spells_something_still_ends_only_a_whole_text():
    token_a, grammar = PIECES.index(b"a"), Grammar("regex", "a?b!")
    assert allowed(grammar, b"", frozenset({token_a})) == ids_of(b"b", b"ab")
    assert allowed(grammar, b"b!", frozenset({token_a})) == {token_a}


def test_special_tokens_are_never_part_of_a_text():
    assert not allowed(Grammar("regex", r"(?s:.+)"), b"") & {0, EOS}


def test_a_character_of_several_tokens_is_allowed_byte_by_byte():
    assert allowed(Grammar("regex", "\u20ac"), b"") == ids_of(b"\xe2")
    assert allowed(Grammar("regex", "\u20ac"), b"\xe2\x82") == ids_of(b"\xac")


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar("regex", "("), "regex: .*unclosed group"),
        (Grammar("regex", "(?=a)b"), "regex: .*look-around"),
        (Grammar("json_schema", "{"), "json_schema: not JSON"),
        (Grammar("json_schema", "[]"), "json_schema must be an object"),
        (Grammar("json_schema", '{"type": "nope"}'), "json_schema: .*nope"),
        (Grammar("json_schema", '{"not": {}}'), "json_schema: .*not"),
        (Grammar("json_schema", '{"enum": []}'), "json_schema: .*Unsatisfiable"),
    ],
)
def test_a_grammar_that_is_none_is_refused_before_the_first_token(grammar, message):
    with pytest.raises(RequestError, match=message) as refused:
        decoded(request(grammar))
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_target_without_an_end_of_text_cannot_follow_a_grammar():
    with pytest.raises(RequestError, match="end-of-text"):
        decoded(request(Grammar("regex", "a"), stop_ids=frozenset()))


def test_a_grammar_that_the_vocabulary_cannot_spell_says_so():
    """The first byte of the euro sign exists, that of the pound sign does not."""
    with pytest.raises(RequestError, match="regex: no token of the target's vocabulary can follow"):
        decoded(request(Grammar("regex", "a\u00a3")))


def test_a_token_the_target_rules_out_itself_is_not_drawn_for_a_grammar():
    table = ToyTable.random(len(PIECES), seed=1)
    table.logits_SV[:, sorted(ids_of(b"a"))] = -np.inf
    with pytest.raises(RequestError, match="no token"):
        decoded(request(Grammar("regex", "a!")), table=table)


def test_other_processors_work_beside_a_grammar():
    """A bias cannot bring in what the grammar rules out, and chooses among what it allows."""
    bias = {PIECES.index(b"z"): 100.0, PIECES.index(b"b"): 90.0}
    sampling = Sampling(1.0, top_k=1, logit_bias=bias, grammar=Grammar("regex", "[abc]{3}"))
    decode_request = Request((5,), (), 20, sampling, stop_ids=STOPS, mode="fast")
    assert text_of(decoded(decode_request, RandomTrees(2, len(PIECES)))) == "bbb"
