"""The shown text: never half a character, never a stop string, never retracted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.stop_checker import StopChecker
from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Request
from omnidraft.vocab.tokenizer import Vocabulary

PIECES = [
    b"<eos>",
    b"a",
    b"b",
    b"ab",
    b"STOP",
    b"ST",
    b"OP",
    b"S",
    b"T",
    b"O",
    b"P",
    b"\xe2",
    b"\x82",
    b"\xac",
    b"a\xe2",
]
VOCABULARY = Vocabulary(tuple(PIECES), {"eos": 0}, frozenset({0}))
EOS = 0


def ids_of(*pieces: bytes) -> list[int]:
    return [PIECES.index(piece) for piece in pieces]


def watch(ids, *, stops=(), stop_ids=(EOS,), max_new_tokens=100, step=1):
    """Shown text of each step, and the watch; the rest of a step is discarded when the text ends in it."""
    request = Request((1,), (), max_new_tokens, stop_ids=frozenset(stop_ids), stop_strings=tuple(stops))
    checker, shown = StopChecker(request, VOCABULARY), []
    for start in range(0, len(ids), step):
        for token in ids[start : start + step]:
            if checker.ends(token):
                break
        shown.append(checker.take())
        if checker.finish_reason is not None:
            break
    return shown, checker.finish_reason


STOPPED, FULL = FinishReason.STOP, FinishReason.LENGTH
EURO = (b"\xe2", b"\x82", b"\xac")
CASES = {
    "a stop string across tokens": ((b"a", b"ST", b"O", b"P", b"b"), [b"STOP"], 100, ["a", "", "", ""], STOPPED),
    "a beginning that became none": ((b"a", b"ST", b"O", b"a"), [b"STOP"], 100, ["a", "", "", "STOa"], None),
    "only what may become one": ((b"ab", b"S", b"S", b"T"), [b"STOP"], 100, ["ab", "", "S", ""], None),
    "the text before one in a token": ((b"ab",), [b"b"], 100, ["a"], STOPPED),
    "the first of two": ((b"a", b"STOP"), [b"OP", b"ST"], 100, ["a", ""], STOPPED),
    "held back until the text is full": ((b"a", b"ST"), [b"STOP"], 2, ["a", "ST"], FULL),
    "held back until a stop token": ((b"a", b"ST", b"<eos>"), [b"STOP"], 100, ["a", "", "ST"], STOPPED),
    "a character of three tokens": ((b"a", *EURO, b"b"), [], 100, ["a", "", "", "\u20ac", "b"], None),
    "a token and half a character": ((b"a\xe2", b"\x82", b"\xac", b"b"), [], 100, ["a", "", "\u20ac", "b"], None),
    "a character that breaks off": ((b"\xe2", b"a"), [], 100, ["", "\ufffda"], None),
    "half a character at the end": ((b"a\xe2",), [], 1, ["a\ufffd"], FULL),
    "a stop string in a character": ((b"a", *EURO), ["\u20ac".encode()], 100, ["a", "", "", ""], STOPPED),
}


@pytest.mark.parametrize(("pieces", "stops", "max_new_tokens", "shown", "reason"), CASES.values(), ids=CASES)
def test_what_each_token_shows(pieces, stops, max_new_tokens, shown, reason):
    assert watch(ids_of(*pieces), stops=stops, max_new_tokens=max_new_tokens) == (shown, reason)


@pytest.mark.parametrize("step", [2, 3, 7])
@given(ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=30), max_new_tokens=st.integers(1, 30))
def test_how_tokens_fall_into_steps_never_shows(step, ids, max_new_tokens):
    """And what was shown once is a beginning of what is shown in the end, without any stop string in it."""
    stops = [b"STOP", b"OPS", b"ba", "\u20ac".encode()]
    one_by_one, reason = watch(ids, stops=stops, max_new_tokens=max_new_tokens)
    by_steps, same_reason = watch(ids, stops=stops, max_new_tokens=max_new_tokens, step=step)
    assert "".join(by_steps) == "".join(one_by_one)
    assert reason == same_reason
    assert not any(stop.decode() in "".join(one_by_one) for stop in stops)


def test_a_stop_string_that_is_no_text_is_refused_before_anything_is_decoded():
    with pytest.raises(RequestError, match=r"stop.*UTF-8"):
        watch(ids_of(b"a"), stops=(b"\xe2\x82",))
