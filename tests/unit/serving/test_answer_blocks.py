"""Blocks are in the order in which the model wrote them, however its text comes in pieces."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.generation import GenerationRequest
from omnidraft.serving.answer_reader import AnswerReader
from omnidraft.serving.blocks import BlockBuilder, BlockChange, blocks_of
from omnidraft.serving.response_formats import ChoicePart
from omnidraft.tools.formats import FORMATS, HERMES, ToolFormat
from omnidraft.tools.tool_use import Tool, ToolUse

REQUEST = GenerationRequest(prompt="x", tools=ToolUse((Tool("count"), Tool("stop"))), request_id="a")
COUNT, STOP = {"name": "count", "arguments": {"n": 7, "of": "}<tool_call>{"}}, {"name": "stop", "arguments": {}}
PIECES = [
    HERMES.render([COUNT, STOP]), *(form.opening + form.render([COUNT]) for form in FORMATS.values()),
    '<tool_call>\n{"name": "co', '<tool_call>{"name": "count", "arguments": {"n"', "<tool_call>", "</tool_call>",
    "[TOOL_CALLS]", "<tool", "[", "]", "{", "}", ";", " ", "\n", '"', "Seven.", "\u00e9",
]  # fmt: skip
Blocks = list[tuple[str | None, str, str]]


def parts_of(text: str, form: ToolFormat, finish_reason: str, cuts: Sequence[int]) -> list[ChoicePart]:
    """The parts of a choice whose text comes in pieces."""
    reader = AnswerReader(REQUEST, form)
    ends = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts = []
    for start, end in pairwise(ends):
        is_last = len(parts) == len(ends) - 2
        part = ChoicePart(0, not parts, finish_reason=finish_reason if is_last else None)
        reader.read(text[start:end], part)
        parts.append(part)
    return parts


def shown(parts: list[ChoicePart]) -> Blocks:
    return [(block.call_id, block.name, block.content) for block in blocks_of(parts)]


def streamed(parts: list[ChoicePart]) -> Blocks:
    """The blocks as a reader of the events puts them together."""
    builder, blocks, open_index = BlockBuilder(), [], None
    for event in (*(event for part in parts for event in builder.take(part)), *builder.finish()):
        if event.change is BlockChange.BEGIN:
            assert open_index is None
            open_index = len(blocks)
            blocks.append((event.block.call_id, event.block.name, ""))
        assert event.block.index == open_index
        call_id, name, content = blocks[-1]
        blocks[-1] = (call_id, name, content + event.delta)
        if event.change is BlockChange.END:
            open_index = None
    assert open_index is None
    return blocks


@given(
    st.lists(st.sampled_from(PIECES), max_size=8),
    st.sampled_from(list(FORMATS.values())),
    st.sampled_from(["stop", "length"]),
    st.lists(st.integers(0, 300), max_size=8),
)
def test_any_pieces_give_the_blocks_of_single_characters(
    pieces: list[str], form: ToolFormat, finish_reason: str, cuts: list[int]
) -> None:
    text = "".join(pieces)
    parts = parts_of(text, form, finish_reason, cuts)
    letters = parts_of(text, form, finish_reason, range(1, len(text)))
    assert shown(parts) == streamed(parts) == shown(letters)
    assert parts[-1].finish_reason == letters[-1].finish_reason


@pytest.mark.parametrize("cuts", [(), (50,), range(200)])
def test_arguments_stay_in_their_call_when_text_follows_in_the_same_step(cuts: Sequence[int]) -> None:
    text = "One " + HERMES.render([STOP]) + " two " + HERMES.render([STOP]) + '\n<tool_call>\n{"name": "co'
    blocks = [(name, content) for _, name, content in shown(parts_of(text, HERMES, "length", cuts))]
    end = '\n<tool_call>\n{"name": "co'
    assert blocks == [("", "One"), ("stop", "{}"), ("", " two"), ("stop", "{}"), ("", end)]


def test_a_whole_chat_has_the_text_and_the_calls_of_its_parts() -> None:
    text = "One " + HERMES.render([COUNT]) + " two " + HERMES.render([STOP])
    for cuts in ((), range(200)):
        whole = ChoicePart(0, True)
        for part in parts_of(text, HERMES, "stop", cuts):
            whole.add(part)
        assert (whole.text, whole.finish_reason) == ("One two", "tool_calls")
        assert [call.name for call in whole.calls] == ["count", "stop"]
        assert [call.arguments for call in whole.calls] == ['{"n": 7, "of": "}<tool_call>{"}', "{}"]
