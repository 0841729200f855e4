"""Answers that may call tools: free text until a call begins, then well-formed calls whose arguments match."""

import json
import re
from typing import Any

import jsonschema
import numpy as np
import pytest

from omnidraft.decode.sampling.grammar import Grammars, Matcher
from omnidraft.decode.sampling.grammar_trial import GrammarTrial
from omnidraft.errors import RequestError
from omnidraft.ports import Grammar
from omnidraft.tools.formats import FORMATS, ToolFormat
from omnidraft.tools.grammar import compilable, grammar_text
from omnidraft.tools.parser import parse
from omnidraft.tools.reasoning import REASONING_FORMATS
from omnidraft.tools.tool_use import tool_use
from omnidraft.vocab.thoughts import Phase, ThoughtMarkers, Thoughts
from omnidraft.vocab.tokenizer import Vocabulary

EOS, MARKER = 0, 1
TOKENS = (b"", b"", *(bytes([byte]) for byte in range(256)), b"<tool_call>", b"</tool_call>", b'{"', b'": ')
VOCABULARY = Vocabulary(TOKENS, {"eos": EOS}, frozenset({EOS, MARKER}))
GRAMMARS = Grammars(VOCABULARY)
CITY = {
    "type": "object",
    "description": "Where",
    "properties": {
        "city": {"enum": ["Paris", "Rome"], "description": "a name"},
        "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 3},
        "description": {"type": "string", "maxLength": 4},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAMES = ("weather", "run")


def tools(*, is_strict: bool = True, parameters: Any = CITY) -> list[dict[str, Any]]:
    weather = {"name": "weather", "parameters": parameters, "strict": is_strict}
    return [{"type": "function", "function": each} for each in (weather, {"name": "run"})]


def grammar(form: ToolFormat, choice: Any = "auto", *, has_id: bool = False, **options: Any) -> Grammar:
    use = tool_use(options.pop("tools", tools()), choice, is_parallel=options.pop("is_parallel", True))
    return Grammar("tools", grammar_text(use, form, {form.opening: MARKER} if has_id else {}, **options))


def is_possible(constraint: Grammar, text: str, form: ToolFormat, *, has_id: bool = False) -> bool:
    """Whether the text can be a whole answer, its markers special tokens where the vocabulary has them as such."""
    matcher = GRAMMARS.matcher(constraint, frozenset({EOS}))
    pieces = text.split(form.opening) if has_id else [text]
    ids = [[byte + 2 for byte in piece.encode()] for piece in pieces]
    return takes_all(matcher, [*[token for piece in ids for token in [MARKER, *piece]][1:], EOS], len(TOKENS))


def takes_all(matcher: Matcher, ids: list[int], vocab_size: int) -> bool:
    """Whether the matcher allows these ids, one after the other."""
    for token in ids:
        logits_V = np.zeros(vocab_size)
        matcher.apply(logits_V)
        if logits_V[token] == -np.inf:
            return False
        matcher.take(token)
    return True


def answers(form: ToolFormat) -> tuple[str, str, str]:
    """A good call, one with arguments that do not match, and two good ones."""
    good = {"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}
    bad = {"name": "weather", "arguments": {"city": "Oslo", "days": []}}
    run = {"name": "run", "arguments": {"x": [1, None, {"y": "z"}]}}
    return form.render([good]), form.render([bad]), form.render([good, run])


@pytest.mark.parametrize("has_id", [False, True], ids=["spelled", "special"])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_choice_decides_what_can_be_said(form: ToolFormat, has_id: bool) -> None:
    good, bad, two = answers(form)

    def possible(choice: Any, text: str, **options: Any) -> bool:
        return is_possible(grammar(form, choice, has_id=has_id, **options), text, form, has_id=has_id)

    assert possible("auto", good)
    assert possible("auto", "Hello, {world}: <tool 3 [TOOL")
    assert possible("auto", "")
    assert not possible("auto", bad)
    assert possible("auto", bad, tools=tools(is_strict=False))
    assert possible("auto", two) is (not form.is_single)
    assert not possible("auto", two, is_parallel=False)
    assert not possible("auto", good + " And a text behind it.")
    assert possible("required", good)
    assert not possible("required", "Hello")
    assert not possible("required", bad, tools=tools(is_strict=False))
    assert possible("none", "Hello")
    assert not possible("none", good)
    named = {"type": "function", "function": {"name": "weather"}}
    assert possible(named, good)
    assert not possible(named, two)
    assert not possible({"type": "function", "function": {"name": "run"}}, good)
    if not form.is_bare:
        assert possible("auto", "I look.\n" + good)


MARKS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|start|>", "<|end|>", "<|return|>")
HARMONY_TOKENS = (*TOKENS[:258], *(b"" for _ in MARKS))
HARMONY_IDS = {text: 258 + place for place, text in enumerate(MARKS)}
HARMONY_GRAMMARS = Grammars(Vocabulary(HARMONY_TOKENS, {"eos": EOS}, frozenset({EOS, *HARMONY_IDS.values()})))
HARMONY_STOPS = frozenset({EOS, HARMONY_IDS["<|call|>"], HARMONY_IDS["<|return|>"]})
HEADER = REASONING_FORMATS["harmony"].header


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}])
def test_gpt_oss_thinks_and_then_calls_in_its_channel(choice: Any) -> None:
    """Its markers are special tokens, of which one ends the text."""
    form, thoughts = FORMATS["harmony"], REASONING_FORMATS["harmony"]
    special = {token: text.encode() for text, token in HARMONY_IDS.items()}
    vocabulary = Vocabulary(HARMONY_TOKENS, {}, frozenset())
    closing = thoughts.closing + thoughts.turn
    markers = ThoughtMarkers(vocabulary, special, thoughts.opening, closing, header=HEADER, may_return=True)

    def is_possible(text: str, content: tuple[str, str] | None = None, *, has_tools: bool = True) -> bool:
        use = tool_use(tools(), choice) if has_tools else None
        constraint = Grammar("tools", grammar_text(use, form, HARMONY_IDS, content, HEADER))
        matcher = HARMONY_GRAMMARS.matcher(constraint, HARMONY_STOPS, Thoughts(markers, Phase.LEAD, has_grammar=True))
        parts = re.split(r"(<\|[a-z]+\|>)", text)
        ids = [[HARMONY_IDS[part]] if part in HARMONY_IDS else [byte + 2 for byte in part.encode()] for part in parts]
        return takes_all(matcher, [token for each in ids for token in each], len(HARMONY_TOKENS))

    thought = "<|channel|>analysis<|message|>We {need} it.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome", "days": []}<|call|>'
    final = "<|channel|>final<|message|>Rome it is.<|return|>"
    assert is_possible(call)
    assert is_possible(thought + call)
    assert is_possible(thought + thought + call)
    assert not is_possible(thought + call.replace("Rome", "Oslo"))
    assert not is_possible(thought.replace("<|end|>", "<|call|>"))
    assert is_possible(thought + final) is (choice == "auto")
    assert not is_possible(thought + "Rome")
    number = ("json_schema", '{"const": 7}')
    assert is_possible(f"{thought}<|channel|>final<|message|>7<|return|>", number, has_tools=False)
    assert is_possible("<|channel|>final<|message|>7<|return|>", number, has_tools=False)
    assert not is_possible(thought + final, number, has_tools=False)
    assert not is_possible("7<|return|>", number, has_tools=False)


GOOD = '{"name": "weather", "arguments": {"city": "Rome", "days": [1, 2]}}'
BAD = '{\n  "name": "weather",\n  "arguments": {"city": "Oslo", "days": []}\n}'
RUN = '{"name": "run", "arguments": {"x": [1, null, {"y": "z"}]}}'


@pytest.mark.parametrize("has_id", [False, True], ids=["spelled", "special"])
def test_calls_without_markers_match_their_schemas_and_other_json_is_free(has_id: bool) -> None:
    form = FORMATS["hermes"]

    def possible(text: str, **options: Any) -> bool:
        return is_possible(grammar(form, has_id=has_id, **options), text, form, has_id=has_id)

    fenced = f"```json\n{GOOD}\n```"
    for text in (GOOD, fenced, f"{GOOD}\n{RUN}", f"{fenced}\n\n```json\n{RUN}\n```", f"\n{RUN}\n{fenced}"):
        assert possible(text), text
    assert parse(f"{fenced}\n```json\n{RUN}\n```", form, NAMES)[1].name == "run"
    for text in (BAD, f"```json\n{BAD}\n```", f"{fenced}\n```json\n{BAD}\n```", f"{fenced} And a text behind it."):
        assert not possible(text), text
    assert possible(BAD, tools=tools(is_strict=False))
    assert not possible(BAD.replace("[]", "[}"), tools=tools(is_strict=False))
    assert possible(fenced, is_parallel=False)
    assert not possible(f"{fenced}\n{fenced}", is_parallel=False)
    for text in (
        '{"name": "Ada", "arguments": 3}',
        '{"name": "run", "age": 3}',
        "[1, 2]",
        "```python\n1\n```",
        "{",
        "```",
    ):
        assert possible(text), text
        assert possible(f"{text} and so on"), text


@pytest.mark.parametrize("form", [FORMATS["hermes"], FORMATS["mistral"]], ids=["hermes", "mistral"])
def test_an_answer_without_calls_matches_the_response_format(form: ToolFormat) -> None:
    content = ("json_schema", '{"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}')
    constraint = grammar(form, content=content)
    assert is_possible(constraint, '{"a": 1}', form)
    assert is_possible(constraint, answers(form)[0], form)
    assert not is_possible(constraint, "Hello", form)


def test_an_answer_in_json_cannot_be_told_from_a_bare_call() -> None:
    with pytest.raises(RequestError, match=r"response_format: .*llama3"):
        grammar(FORMATS["llama3"], content=("json_schema", "{}"))
    assert grammar(FORMATS["llama3"], "required", content=("json_schema", "{}"))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_random_tokens_make_calls_that_match(form: ToolFormat, choice: Any, seed: int) -> None:
    """Whatever the vocabulary's draws are, an answer that ends is nothing but calls that match their schemas."""
    rng = np.random.default_rng(seed)
    matcher = GRAMMARS.matcher(grammar(form, choice, tools=tools()[:1]), frozenset({EOS}))
    said = b""
    for _ in range(4000):
        logits_V = np.zeros(len(TOKENS))
        matcher.apply(logits_V)
        allowed = np.flatnonzero(logits_V > -np.inf)
        token = EOS if EOS in allowed else int(rng.choice(allowed))
        if token == EOS:
            break
        matcher.take(token)
        said += TOKENS[token]
    assert token == EOS
    calls = parse(said.decode("utf-8", "replace"), form, {"weather": CITY, "run": None})
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), CITY)


def test_a_schema_that_cannot_be_compiled_is_refused_by_its_tool_if_it_is_strict() -> None:
    impossible = {"properties": {"a": {"type": "nonsense"}}}
    form = FORMATS["hermes"]
    with pytest.raises(RequestError, match=r"tools: parameters of 'weather': .*nonsense"):
        GRAMMARS.compile(grammar(form, tools=tools(parameters=impossible)))
    lenient = grammar(form, "required", tools=tools(is_strict=False, parameters=impossible))
    assert is_possible(lenient, form.render([{"name": "weather", "arguments": {"b": 1}}]), form)


def test_schemas_beyond_the_bounds_of_grammars_are_refused() -> None:
    many = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1001)}}
    with pytest.raises(RequestError, match="tools: 1001 properties, at most 1000"):
        GRAMMARS.compile(grammar(FORMATS["hermes"], tools=tools(parameters=many)))


def test_it_is_tried_in_the_child_as_every_grammar() -> None:
    trial = GrammarTrial(VOCABULARY)
    for form in FORMATS.values():
        trial.check("tools", grammar(form).text)


def test_a_schema_that_is_too_slow_is_refused_even_if_no_call_may_come() -> None:
    slow = {"type": "object", "patternProperties": {f"^a{i}[a-z]*$": {"type": "integer"} for i in range(300)}}
    with pytest.raises(RequestError, match=r"tools: .*(processor time|SIGPROF|too complex|simpler|limit)"):
        GrammarTrial(VOCABULARY).check("tools", grammar(FORMATS["hermes"], tools=tools(parameters=slow)).text)


def test_annotations_go_and_names_stay() -> None:
    assert compilable(CITY) == {
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Rome"]},
            "days": CITY["properties"]["days"],
            "description": {"type": "string", "maxLength": 4},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    kept = {"const": {"description": 1}, "anyOf": [{"title": "x", "enum": [{"title": "y"}]}]}
    assert compilable(kept) == {"const": {"description": 1}, "anyOf": [{"enum": [{"title": "y"}]}]}
