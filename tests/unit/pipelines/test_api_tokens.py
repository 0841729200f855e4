"""An API's tokens become the target's ids, or nothing: what is not certain is refused."""

import numpy as np
import pytest

from omnidraft.vocab.tokenizer import Vocabulary
from pipelines.lib.api_answers import ApiPosition, ApiToken
from pipelines.lib.api_recording import (
    FOREIGN,
    NO_LOGPROBS,
    UNSPELLED,
    AnswerRefused,
    ApiTokenMapper,
)

EURO = "\u20ac".encode()
SPELLED = (b"", b"a", b" river", EURO[:1], EURO[1:], b"a", b"\n", b"", b"b")
END, PADDING = 0, 7
MAPPER = ApiTokenMapper(Vocabulary(SPELLED, {"eos": END}, frozenset({END})), {"<|end|>": END})


def token(data: bytes | None, text: str = "?", log_p: float | None = -1.0) -> ApiToken:
    return ApiToken(token=text, bytes=None if data is None else list(data), logprob=log_p)


def position(data: bytes, log_p: float | None, *others: tuple[bytes, float | None]) -> ApiPosition:
    likeliest = [token(each, log_p=other_log_p) for each, other_log_p in others]
    return ApiPosition(token="?", bytes=list(data), logprob=log_p, top_logprobs=likeliest)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (token(b" river"), 2),
        (token(EURO[:1], "bytes:\\xe2"), 3),
        (token(None, "bytes:\\x82\\xac"), 4),
        (token(None, " river"), 2),
        (token(b"a"), 1),
        (token(b"<|end|>", "<|end|>"), END),
        (token(b"", "<|end|>"), END),
        (token(b"", "id:0"), END),
        (token(b"", "id:7"), PADDING),
        (token(None, "<|end|>"), END),
    ],
    ids=[
        "bytes",
        "a part",
        "escaped",
        "text alone",
        "the lower of two",
        "special",
        "no bytes",
        "ours",
        "padding",
        "text",
    ],
)
def test_a_token_is_found_by_its_bytes_or_by_the_name_of_a_special_one(given: ApiToken, expected: int) -> None:
    assert MAPPER.emitted_id(given) == expected


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (token(b"river"), FOREIGN),
        (token(EURO), FOREIGN),
        (token(None, "river"), FOREIGN),
        (token(None, "\ud83d"), FOREIGN),
        (token(None, "\ufffd"), UNSPELLED),
        (token(b"", ""), UNSPELLED),
        (token(b"", "id:1"), UNSPELLED),
        (token(b"", "id:9"), UNSPELLED),
    ],
)
def test_a_token_that_is_none_of_the_targets_is_refused(given: ApiToken, reason: str) -> None:
    with pytest.raises(AnswerRefused) as refused:
        MAPPER.emitted_id(given)
    assert str(refused.value) == reason


def test_all_likeliest_tokens_count_the_emitted_one_too_and_what_is_left_is_the_tail() -> None:
    rows = [
        position(b"a", np.log(0.5), (b"a", np.log(0.5)), (b" river", np.log(0.25)), (b"\n", np.log(0.125))),
        position(b"b", np.log(0.25), (b"a", np.log(0.5))),
        position(b"\n", np.log(0.5)),
    ]
    logprobs = MAPPER.logprobs(rows, [1, 8, 6])
    assert logprobs.top_ids_EK.tolist() == [[1, 2, 6], [1, 8, 1], [6, 6, 6]]
    expected = [[0.5, 0.25, 0.125], [0.5, 0.25, 0], [0.5, 0, 0]]
    np.testing.assert_allclose(np.exp(logprobs.top_log_p_EK.astype(float)), expected, rtol=2e-3)
    np.testing.assert_allclose(np.exp(logprobs.emitted_log_p_E.astype(float)), [0.5, 0.25, 0.5], rtol=2e-3)
    np.testing.assert_allclose(np.exp(logprobs.tail_log_p_E.astype(float)), [0.125, 0.25, 0.5], rtol=2e-3)


def test_a_likely_token_that_nobody_can_name_is_a_part_of_the_tail_and_a_foreign_one_refuses_the_answer() -> None:
    unnamed = ApiToken(token="\ufffd", logprob=float(np.log(0.25)))
    row = ApiPosition(token="a", logprob=float(np.log(0.5)), top_logprobs=[unnamed, token(b"", "")])
    assert np.exp(MAPPER.logprobs([row], [1]).tail_log_p_E[0]) == pytest.approx(0.5, rel=2e-3)
    with pytest.raises(AnswerRefused, match=FOREIGN):
        MAPPER.logprobs([position(b"a", -1.0, (b"ocean", -2.0))], [1])


@pytest.mark.parametrize("log_p", [None, float("nan")])
def test_an_emitted_token_without_a_log_probability_refuses_the_answer_and_a_likely_one_is_tail(
    log_p: float | None,
) -> None:
    with pytest.raises(AnswerRefused, match=NO_LOGPROBS):
        MAPPER.logprobs([position(b"a", log_p)], [1])
    assert MAPPER.logprobs([position(b"a", -1.0, (b"b", log_p))], [1]).top_ids_EK.tolist() == [[1]]


def test_probabilities_that_were_rounded_up_leave_no_tail() -> None:
    logprobs = MAPPER.logprobs([position(b"a", 1e-6, (b"b", -9999.0))], [1])
    assert (logprobs.emitted_log_p_E[0], logprobs.tail_log_p_E[0]) == (0.0, -np.inf)
