"""Thoughts and answer are told apart however the text is cut, and a text without thoughts loses nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.tools.reasoning import (
    REASONING_FORMATS,
    AnswerPart,
    ReasoningFormat,
    ReasoningSplitter,
    detect_reasoning,
)

THINK, HARMONY = REASONING_FORMATS["think"], REASONING_FORMATS["harmony"]
PIECES = ["<think>", "</think>", "<|channel|>", "analysis", "final", "<|message|>", "<|end|>", "<", "a b", "\n", " "]


def split(text: str, form: ReasoningFormat, cuts: tuple[int, ...] = (), *, is_open: bool = False) -> tuple[str, str]:
    """The thoughts and the content of a text that comes in pieces."""
    splitter = ReasoningSplitter(form, is_open=is_open)
    ends = [*sorted(min(cut, len(text)) for cut in cuts), len(text)]
    parts: list[AnswerPart] = []
    for start, end in zip([0, *ends], ends, strict=False):
        parts += splitter.feed(text[start:end])
    parts += splitter.finish()
    thoughts, content = ("".join(each.text for each in parts if each.is_reasoning is kind) for kind in (True, False))
    return thoughts, content


@pytest.mark.parametrize(
    ("text", "form", "is_open", "expected"),
    [
        ("<think>\nOne.\n\nTwo.\n</think>\n\nHi  there.", THINK, False, ("One.\n\nTwo.", "Hi  there.")),
        ("One.\n</think>\nHi", THINK, True, ("One.", "Hi")),
        ("One", THINK, True, ("One", "")),
        ("Hi, <think> and </think> are tags.", THINK, False, ("", "Hi, <think> and </think> are tags.")),
        ("<think>a</think>b <think>c</think>", THINK, False, ("a", "b <think>c</think>")),
        ("[THINK]a[/THINK]b", REASONING_FORMATS["mistral"], False, ("a", "b")),
        ("<|channel>thought\na<channel|>b", REASONING_FORMATS["gemma"], False, ("a", "b")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
            HARMONY,
            False,
            ("a", "b"),
        ),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}",
            HARMONY,
            False,
            ("a", "<|channel|>commentary to=functions.f<|message|>{}"),
        ),
        ("  \n", THINK, False, ("", "")),
        ("x = 1\n", THINK, False, ("", "x = 1\n")),
    ],
)
def test_thoughts_are_told_from_the_answer(
    text: str, form: ReasoningFormat, is_open: bool, expected: tuple[str, str]
) -> None:
    assert split(text, form, is_open=is_open) == expected
    assert split(text, form, tuple(range(len(text))), is_open=is_open) == expected


def test_text_goes_on_as_soon_as_it_is_no_marker() -> None:
    splitter = ReasoningSplitter(THINK, is_open=False)
    assert splitter.feed("<thi") == []
    assert splitter.feed("s") == [AnswerPart("<this", False)]
    splitter = ReasoningSplitter(THINK, is_open=True)
    assert splitter.feed("a </th") == [AnswerPart("a", True)]
    assert splitter.feed("e") == [AnswerPart(" </the", True)]


@given(
    st.lists(st.sampled_from(PIECES), max_size=16),
    st.sampled_from(list(REASONING_FORMATS.values())),
    st.lists(st.integers(0, 100), max_size=6),
    st.booleans(),
)
def test_cuts_change_nothing(pieces: list[str], form: ReasoningFormat, cuts: list[int], is_open: bool) -> None:
    text = "".join(pieces)
    assert split(text, form, tuple(cuts), is_open=is_open) == split(text, form, is_open=is_open)


def test_a_template_says_how_its_model_thinks() -> None:
    assert detect_reasoning("{{ '<think>' }}") is THINK
    assert detect_reasoning("{{ '<|channel|>analysis' }}") is HARMONY
    assert detect_reasoning("{{ 'no thoughts' }}") is None
