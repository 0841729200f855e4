"""A given text has the log-probabilities that it would have if the target had emitted it."""

import numpy as np
import pytest

from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.teacher_forcing import force
from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Sampling
from omnidraft.traces import codec
from tests.unit.decode.toys import TARGET_EOS, T, emitted, make_request, toy_decoder

TOP_K = 4


@pytest.mark.parametrize("max_new_tokens", [1, 7, 24])
def test_beliefs_are_those_of_decoding_the_same_text(max_new_tokens: int) -> None:
    decoder = toy_decoder(trace_top_k=TOP_K)
    request = make_request(Sampling(1.0), max_new_tokens=max_new_tokens)
    plain = list(decoder.decode(request, None))
    steps = list(force(decoder.target, request, emitted(plain), TOP_K))
    assert emitted(steps) == emitted(plain)
    assert steps[-1].finish_reason == plain[-1].finish_reason
    assert not any(len(step.tree) - 1 for step in steps)
    for name in ("top_ids_EK", "top_log_p_EK", "emitted_log_p_E", "tail_log_p_E"):
        forced, expected = (
            np.concatenate([getattr(step.target_logprobs, name) for step in each]) for each in (steps, plain)
        )
        np.testing.assert_allclose(forced.astype(np.float64), expected.astype(np.float64), rtol=2e-3, err_msg=name)


def test_texts_that_the_target_would_never_say_are_scored_to_their_end() -> None:
    decoder, request = toy_decoder(trace_top_k=TOP_K), make_request(Sampling(0.0), stop_ids=frozenset({TARGET_EOS}))
    said = [T[b"x"] if b"x" in T else T[b"a"], T[b"cd"], T[b"gh"], T[b"\n"]] * 5
    steps = list(force(decoder.target, request, [*said, TARGET_EOS], TOP_K))
    assert emitted(steps) == [*said, TARGET_EOS]
    assert steps[-1].finish_reason == FinishReason.STOP
    assert all(step.finish_reason is None for step in steps[:-1])


def test_steps_make_records_that_readers_take() -> None:
    decoder, request = toy_decoder(trace_top_k=TOP_K), make_request(max_new_tokens=20)
    records = []
    context = RecordContext("r", "t", "w", "target", "drafter", None, "f")
    builder = TraceRecordBuilder(request, context, records.append, segment_tokens=8)
    for step in force(decoder.target, request, [T[b"a"]] * 20, TOP_K):
        builder.take(step)
    assert sum(len(record.emitted_ids) for record in records) == 20
    for record in records:
        assert codec.decode(codec.encode(record), codec.headers(record)).request_id == "r"


def test_an_answer_that_does_not_fit_is_refused() -> None:
    decoder = toy_decoder()
    too_long = decoder.target.context_limit
    with pytest.raises(RequestError):
        list(force(decoder.target, make_request(max_new_tokens=too_long), [T[b"a"]] * too_long, TOP_K))
