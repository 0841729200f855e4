"""Calls are taken out of a text however it is cut, and no text breaks the parser or loses anything but white space."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.tools.formats import FORMATS, ToolFormat
from omnidraft.tools.parser import MAX_HEAD_CHARS, Parsed, ToolCallParser

LINES = {"type": "array", "items": {}}
SCHEMAS = {
    "read_file": {"properties": {"path": {"type": "string"}, "lines": LINES}},
    "bash": {"properties": {"command": {"type": "string"}, "n": {"type": ["integer", "null"]}}},
}
NAMES = tuple(SCHEMAS)
WITH_JSON = {name: form for name, form in FORMATS.items() if form.keyed is None}
HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
READ = {"name": "read_file", "arguments": {"path": "a.py", "lines": [1, {"to": 9}]}}
BASH = {"name": "bash", "arguments": {"command": 'echo "}{[" \\\\ </tool_call>; ls'}}
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>", "[", "]", "{", "}", ",", ";",
    " ", "\n", '"', "\\", '"name"', ":", '"read_file"', '"bash"', '"other"', '"arguments"', '"parameters"', '{"a": 1}',
    "<function=bash>", "<parameter=command>", "</parameter>", "</function>", "<arg_key>", "<|channel|>commentary",
    "to=functions.bash", "<|message|>", "<|call|>", "bash", "[ARGS]", "(command=1)", "call:bash", "<escape>",
    "text",     '{"name": "bash", "arguments": {', '{"name": "bash", "parameters": {}}', "\ud800", "\u00e9",
    "```", "json",
]  # fmt: skip


def parsed(text: str, form: ToolFormat, cuts: tuple[int, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of a text that comes in pieces, put together again."""
    parser = ToolCallParser(form, SCHEMAS)
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = [parser.feed(text[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    parts.append(parser.finish())
    return joined(parts)


def joined(parts: list[Parsed]) -> tuple[str, list[tuple[str, str]]]:
    calls: list[tuple[str, str]] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.name is not None:
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        name, arguments = calls[delta.index]
        assert delta.index == len(calls) - 1
        calls[-1] = (name, arguments + delta.arguments)
    return "".join(part.content for part in parts), calls


def expected(*calls: dict) -> list[tuple[str, str]]:
    return [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("before", ["", "I will look.\n\n"])
def test_what_a_format_writes_is_read_again(form: ToolFormat, before: str) -> None:
    text = before + form.opening * (form.is_bare and bool(before)) + form.render([READ, BASH])
    assert parsed(text, form) == (before.rstrip(), expected(READ, BASH))


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, '<tool_call>[{"name": "bash", "arguments": {}}, {"name":"bash","arguments":{}}]</tool_call>'),
        (
            HERMES,
            '<tool_call>{"name": "bash", "parameters": {}}</tool_call>\n<tool_call>{"name": "bash", "arguments": {}}',
        ),
        (HERMES, '{"name": "bash", "arguments": {}}\n{"name": "bash", "arguments": {}}'),
        (HERMES, '```json\n{\n  "name": "bash",\n  "arguments": {}\n}\n```\n' * 2),
        (HERMES, '```\n{"name": "bash", "arguments": {}}\n{"name": "bash", "arguments": {}}\n```'),
        (HERMES, '\n```json\n[{"name": "bash", "arguments": {}}, {"name": "bash", "arguments": {}}]```'),
        (HERMES, '{"name": "bash", "arguments": {}}</tool_call>\n{"name": "bash", "arguments": {}}</tool_call>'),
        (LLAMA3, '<|python_tag|>{"name": "bash", "parameters": {}}; {"name": "bash", "parameters": {}}'),
        (LLAMA3, '\n{ "name" : "bash",\n "parameters" : {}\n}\n;{"name": "bash", "arguments": {}}'),
        (MISTRAL, '[TOOL_CALLS] [{"name": "bash", "arguments": {}},{"name": "bash", "arguments": {} }]'),
        (LLAMA3, '[{"name": "bash", "parameters": {}}, {"name": "bash", "parameters": {}}]'),
        (FORMATS["phi4_mini"], '[{"type": "function", "function": {"name": "bash", "arguments": {}}}]' * 2),
        (FORMATS["harmony"], "<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{}<|call|>" * 2),
        (FORMATS["mistral_args"], "[TOOL_CALLS]bash[CALL_ID]a1B2c3D4e[ARGS]{}[TOOL_CALLS]bash[ARGS]{}"),
        (FORMATS["kimi"], "<|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>{}<|tool_call_end|>" * 2),
        (
            FORMATS["qwen3_coder"],
            "<tool_call>\n<function=bash>\n</function>\n</tool_call><tool_call><function=bash></function>",
        ),
    ],
)
def test_the_ways_in_which_models_of_a_family_vary_are_read(form: ToolFormat, text: str) -> None:
    assert parsed(text, form) == ("", [("bash", "{}")] * 2)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "a < b, <tool, <tool_call, <tool_call> and </tool_call>"),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "bash", "arguments": "none"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "bash"' + " " * MAX_HEAD_CHARS + ', "arguments": {}}'),
        (HERMES, '{"name": "Ada", "arguments": {}}'),
        (HERMES, '{"name": "bash", "version": 5}'),
        (HERMES, '{"bash": {"name": "bash", "arguments": {}}}'),
        (HERMES, '```json\n{"name": "Ada", "arguments": {}}\n```'),
        (HERMES, '```python\nprint({"name": "bash", "arguments": {}})\n```'),
        (HERMES, 'It is {"name": "bash", "arguments": {}}'),
        (LLAMA3, '{"name": "Ada", "parameters": 3}'),
        (LLAMA3, '<|python_tag|>brave_search.call(query="rain")'),
        (LLAMA3, 'It is {"name": "bash", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] are what they are"),
        (MISTRAL, "[TOOL_CALLS]unknown[ARGS]{}"),
        (FORMATS["glm"], "<tool_call>bashful\n</tool_call>"),
        (FORMATS["llama4"], "[bash, read_file]"),
        (HERMES, "  \n "),
    ],
)
def test_what_looks_like_a_call_and_is_none_is_text(form: ToolFormat, text: str) -> None:
    assert parsed(text, form) == (text, [])


def test_other_json_goes_on_as_soon_as_it_is_no_call() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert [parser.feed(piece).content for piece in ('```json\n{"na', 'me": "ba', 'sh", ', '"age": 3}')] == [
        "",
        "",
        "",
        '```json\n{"name": "bash", "age": 3}',
    ]
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.feed('{"n').content == ""
    assert parser.feed("umber").content == '{"number'


@pytest.mark.parametrize("fence", ["```json\n", "```\n", "```json"])
def test_a_call_in_a_fence_is_read_wherever_it_stands(fence: str) -> None:
    fenced = fence + '{"name": "bash", "arguments": {}}\n```'
    assert parsed(f"{fenced}\nIt lists:\n{fenced}", HERMES) == ("\nIt lists:", [("bash", "{}")] * 2)
    code = "```python\nprint(42)\n```"
    assert parsed(f"Like {code} it is.\n{fenced} Done.", HERMES) == (f"Like {code} it is. Done.", [("bash", "{}")])


def test_a_call_behind_a_false_one_is_read() -> None:
    text = "<tool_call>no " + HERMES.render([BASH]) + " done"
    assert parsed(text, HERMES) == ("<tool_call>no done", expected(BASH))


def test_a_call_that_is_cut_off_keeps_the_arguments_that_came() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    parser.feed('<tool_call>{"name": "bash", "arguments": {"command": "l')
    assert parser.has_open_call
    assert parsed('<tool_call>{"name": "bash", "arguments": {"command": "l', HERMES) == (
        "",
        [("bash", '{"command": "l')],
    )
    assert parsed('<tool_call>{"name": "bash", "argu', HERMES) == ('<tool_call>{"name": "bash", "argu', [])


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_another_familys_notation_is_understood_and_told_of(form: ToolFormat) -> None:
    for other in FORMATS.values():
        if other is not form and not (other.is_bare or form.is_bare):
            parser = ToolCallParser(form, SCHEMAS)
            parts = [parser.feed(other.render([READ, BASH])), parser.finish()]
            assert joined(parts) == ("", expected(READ, BASH)), other.name
            assert parser.unusual is other


@pytest.mark.parametrize("name", ["qwen3_coder", "minimax", "glm"])
def test_values_without_types_have_those_of_the_schema(name: str) -> None:
    def read(**arguments: object) -> object:
        ((_, text),) = parsed(FORMATS[name].render([{"name": "bash", "arguments": arguments}]), FORMATS[name])[1]
        return json.loads(text)

    assert read(command="5", n=5) == {"command": "5", "n": 5}
    assert read(command='a\n"b', n="five") == {"command": 'a\n"b', "n": "five"}
    assert read(n=None, other="[1]") == {"n": None, "other": "[1]"}


@pytest.mark.parametrize(
    ("text", "expected_arguments"),
    [
        ("call:bash{command:<escape>ls {a: 1}, <escape>,n:5}", {"command": "ls {a: 1}, ", "n": 5}),
        ('call:bash{n:null,command:"x"}', {"n": None, "command": "x"}),
        ("call:bash{}", {}),
    ],
)
def test_gemmas_objects_are_read(text: str, expected_arguments: dict) -> None:
    whole = f"<start_function_call>{text}<end_function_call>"
    for cuts in ((), tuple(range(len(whole)))):
        content, ((name, arguments),) = parsed(whole, FORMATS["function_gemma"], cuts)
        assert (content, name, json.loads(arguments)) == ("", "bash", expected_arguments)


def test_pythons_calls_are_read() -> None:
    text = """<|python_start|>[bash(command='echo ")"', n=None), read_file(path="a", lines=[true, {"b": null}])]"""
    assert [json.loads(arguments) for _, arguments in parsed(text, FORMATS["llama4"])[1]] == [
        {"command": 'echo ")"', "n": None},
        {"path": "a", "lines": [True, {"b": None}]},
    ]


@pytest.mark.parametrize("form", WITH_JSON.values(), ids=WITH_JSON)
def test_arguments_and_content_go_on_as_soon_as_they_are_sure(form: ToolFormat) -> None:
    """A letter at a time: content waits only while it may begin a marker, arguments never."""
    parser = ToolCallParser(form, NAMES)
    assert "".join(parser.feed(letter).content for letter in "Hello, world") == "Hello, world"
    parser = ToolCallParser(form, NAMES)
    text = form.render([BASH])
    begin = text.index('{"command"')
    for letter in text[:begin]:
        assert not parser.feed(letter).content
    for letter in text[begin : begin + 18]:
        parser.feed(letter)
    assert parser.feed("x").calls[0].arguments == "x"


@given(
    st.lists(st.sampled_from(PIECES), max_size=24),
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.integers(0, 200), max_size=8),
)
def test_any_text_is_parsed_and_its_cuts_change_nothing(pieces: list[str], form: ToolFormat, cuts: list[int]) -> None:
    text = "".join(pieces)
    whole = parsed(text, form)
    assert parsed(text, form, tuple(cuts)) == whole
    assert parsed(text, form, tuple(range(len(text)))) == whole
    content, calls = whole
    if not calls:
        assert content == text


@given(st.binary(max_size=200), st.sampled_from(list(FORMATS.values())), st.lists(st.integers(0, 200), max_size=5))
def test_any_bytes_are_parsed(data: bytes, form: ToolFormat, cuts: list[int]) -> None:
    text = data.decode("utf-8", "replace")
    assert parsed(text, form, tuple(cuts)) == parsed(text, form) == (text, [])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(max_size=6), _JSON, max_size=3)), min_size=1),
    st.sampled_from(list(WITH_JSON.values())),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_any_arguments_are_read_to_the_letter(calls: list[tuple[str, dict]], form: ToolFormat, cuts: list[int]) -> None:
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    assert parsed(form.render(written), form, tuple(cuts)) == ("", expected(*written))
