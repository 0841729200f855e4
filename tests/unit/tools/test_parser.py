"""Calls are taken out of a text however it is cut, and no text breaks the parser or loses anything but white space."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.tools.formats import FORMATS, ToolFormat
from omnidraft.tools.parser import MAX_HEAD_CHARS, Parsed, ToolCallParser

NAMES = ("read_file", "bash")
HERMES, LLAMA3, MISTRAL = FORMATS["hermes"], FORMATS["llama3"], FORMATS["mistral"]
READ = {"name": "read_file", "arguments": {"path": "a.py", "lines": [1, {"to": 9}]}}
BASH = {"name": "bash", "arguments": {"command": 'echo "}{[" \\\\ </tool_call>; ls'}}
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<tool", "_call>", "[", "]", "{", "}", ",", ";",
    " ", "\n", '"', "\\", '"name"', ":", '"read_file"', '"bash"', '"other"', '"arguments"', '"parameters"', '{"a": 1}',
    "text",     '{"name": "bash", "arguments": {', '{"name": "bash", "parameters": {}}', "\ud800", "\u00e9",
    "```", "json",
]  # fmt: skip


def parsed(text: str, form: ToolFormat, cuts: tuple[int, ...] = ()) -> tuple[str, list[tuple[str, str]]]:
    """The content and the calls of a text that comes in pieces, put together again."""
    parser = ToolCallParser(form, NAMES)
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
        (LLAMA3, '```json\n{"name": "bash", "parameters": {}}\n```'),
        (MISTRAL, '{"name": "bash", "arguments": {}}'),
        (LLAMA3, '{"name": "Ada", "parameters": 3}'),
        (LLAMA3, '[{"name": "bash", "parameters": {}}]'),
        (LLAMA3, '<|python_tag|>brave_search.call(query="rain")'),
        (LLAMA3, 'It is {"name": "bash", "parameters": {}}'),
        (MISTRAL, "[TOOL_CALLS] are what they are"),
        (MISTRAL, '[{"name": "bash", "arguments": {}}]'),
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


def test_text_behind_a_call_without_markers_is_content() -> None:
    fenced = '```json\n{"name": "bash", "arguments": {}}\n```'
    assert parsed(f"{fenced}\nIt lists:\n{fenced}", HERMES) == (f"\nIt lists:\n{fenced}", [("bash", "{}")])


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
    st.sampled_from(list(FORMATS.values())),
    st.lists(st.integers(0, 500), max_size=8),
)
def test_any_arguments_are_read_to_the_letter(calls: list[tuple[str, dict]], form: ToolFormat, cuts: list[int]) -> None:
    written = [{"name": name, "arguments": arguments} for name, arguments in calls]
    assert parsed(form.render(written), form, tuple(cuts)) == ("", expected(*written))
