"""The shown text: never half a character, never a stop string, never retracted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.decode.stop_checker import StopChecker
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


def test_a_stop_string_is_found_across_token_borders():
    shown, reason = watch(ids_of(b"a", b"ST", b"O", b"P", b"b"), stops=[b"STOP"])
    assert (shown, reason) == (["a", "", "", ""], FinishReason.STOP)


def test_a_beginning_that_did_not_become_a_stop_string_is_shown_after_all():
    shown, reason = watch(ids_of(b"a", b"ST", b"O", b"a"), stops=[b"STOP"])
    assert (shown, reason) == (["a", "", "", "STOa"], None)


def test_only_the_part_that_may_become_a_stop_string_is_held_back():
    shown, _ = watch(ids_of(b"ab", b"S", b"S", b"T"), stops=[b"STOP"])
    assert shown == ["ab", "", "S", ""]


def test_the_text_before_a_stop_string_inside_one_token_is_shown():
    shown, reason = watch(ids_of(b"ab"), stops=[b"b"])
    assert (shown, reason) == (["a"], FinishReason.STOP)


def test_of_two_stop_strings_the_text_ends_at_the_first():
    shown, _ = watch(ids_of(b"a", b"STOP"), stops=[b"OP", b"ST"])
    assert "".join(shown) == "a"


def test_what_was_held_back_is_shown_when_the_text_is_full():
    shown, reason = watch(ids_of(b"a", b"ST"), stops=[b"STOP"], max_new_tokens=2)
    assert (shown, reason) == (["a", "ST"], FinishReason.LENGTH)


def test_what_was_held_back_is_shown_when_a_stop_token_follows():
    shown, reason = watch([*ids_of(b"a", b"ST"), EOS], stops=[b"STOP"])
    assert (shown, reason) == (["a", "", "ST"], FinishReason.STOP)


def test_a_special_token_that_stops_nothing_shows_nothing():
    shown, reason = watch([*ids_of(b"a"), 0], stop_ids=())
    assert reason is None
    assert shown[0] == "a"


def test_a_character_of_three_tokens_is_shown_when_it_is_complete():
    shown, _ = watch(ids_of(b"a\xe2", b"\x82", b"\xac", b"b"))
    assert shown == ["a", "", "\u20ac", "b"]


def test_a_character_that_breaks_off_is_marked():
    assert watch(ids_of(b"\xe2", b"a"))[0] == ["", "\ufffda"]
    assert watch(ids_of(b"a\xe2"), max_new_tokens=1) == (["a\ufffd"], FinishReason.LENGTH)


def test_a_stop_string_may_be_part_of_a_character():
    shown, reason = watch(ids_of(b"a", b"\xe2", b"\x82", b"\xac"), stops=["\u20ac".encode()])
    assert (shown, reason) == (["a", "", "", ""], FinishReason.STOP)


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
