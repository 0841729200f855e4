"""The native Llama pass gives the logits of transformers, within the rounding of its precision."""

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from omnidraft.errors import ContractError
from omnidraft.models.native import model as native_model
from omnidraft.models.native.drafter import NativeDrafter
from tests.unit.models.session_driver import drive
from tests.unit.models.tiny import SHAPE, VOCAB_SIZE, text, whole_pass

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPES = {
    "grouped queries": {},
    "nine heads on three": {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16},
    "five heads on one": {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 32},
    "no groups": {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 48},
    "sizes of no block": {"hidden_size": 72, "intermediate_size": 100, "vocab_size": 301, "head_dim": 16},
    "tied, llama3 rope": {"tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
}
HOW_FAR = {"bfloat16": 0.1, "packed16": 0.1, "int8": 0.2}
"""Deviation of the logits from the exact ones, relative to their own: twice what was seen over these wild random models
(0.04 and 0.1; transformers itself in bfloat16: up to 0.2). A wrong sign, scale or slot shows as 1."""


@lru_cache(maxsize=8)
def model(shape: str = "grouped queries") -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | SHAPES[shape])).eval().requires_grad_(False)


@lru_cache(maxsize=8)
def drafter(shape: str = "grouped queries", precision: str = "float32") -> NativeDrafter:
    return NativeDrafter(model(shape), precision)


def expected(ids: list[int], shape: str = "grouped queries") -> torch.Tensor:
    return whole_pass(model(shape), ids)[-1]


def assert_close(got: np.ndarray, reference: torch.Tensor) -> None:
    torch.testing.assert_close(torch.from_numpy(got), reference, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@settings(max_examples=10)
@given(data=st.data())
def test_any_calls_say_what_transformers_says_of_the_text(shape, data):
    drive(
        drafter(shape).open(),
        data,
        lambda ids: expected(ids, shape),
        assert_close,
        vocab_size=model(shape).config.vocab_size,
    )


@pytest.mark.parametrize("precision", HOW_FAR)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_rounded_precision_stays_close(shape, precision):
    session, ids = drafter(shape, precision).open(), text(70)
    session.prefill_or_extend(0, ids)
    rows = [*session.branch([3, 4, 5], [-1, 0, -1]), session.prefill_or_extend(70, [3, 4, 6])]
    reference = [expected([*ids, *more], shape) for more in ([3], [3, 4], [5], [3, 4, 6])]
    for got, logits in zip(rows, reference, strict=True):
        assert (torch.from_numpy(got) - logits).std() / logits.std() < HOW_FAR[precision]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_rows_threads_and_branches_change_no_bit(precision):
    ids, threads = text(30), torch.get_num_threads()
    drafted = drafter("nine heads on three", precision)
    whole = drafted.open().prefill_or_extend(0, ids)
    try:
        torch.set_num_threads(3)
        session = drafted.open()
        for number, token in enumerate(ids[:20]):
            session.prefill_or_extend(number, [token])
        session.branch(ids[20:28], range(-1, 7))
        assert np.array_equal(session.prefill_or_extend(20, ids[20:]), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_long_text_runs_through_several_passes_and_grows_its_slots(monkeypatch):
    monkeypatch.setattr(native_model, "_CAPACITY_STEP", 32)
    session, ids = drafter().open(), text(200)
    session.prefill_or_extend(0, ids[:10])
    assert_close(session.prefill_or_extend(10, ids[10:]), expected(ids))
    assert_close(session.branch([7], [-1])[0], expected([*ids, 7]))
    assert_close(session.branch(ids[:40], [0, *range(1, 40)])[-1], expected([*ids, 7, *ids[:40]]))


def test_more_threads_than_before_find_room():
    session, ids, threads = drafter().open(), text(9), torch.get_num_threads()
    session.prefill_or_extend(0, ids)
    try:
        torch.set_num_threads(threads + 2)
        assert_close(session.prefill_or_extend(9, [3]), expected([*ids, 3]))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("ids", [[VOCAB_SIZE], [-1], [1] * 257], ids=["no such id", "negative", "too long"])
def test_what_the_tables_do_not_hold_is_refused(ids):
    with pytest.raises(ContractError, match="tables"):
        drafter().open().prefill_or_extend(0, ids)


def test_a_model_loading_in_another_thread_changes_nothing():
    """transformers sets the default dtype of the whole process while it loads; half the room would be written over."""
    session = drafter().open()
    session.prefill_or_extend(0, text(5))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        rows = [session.branch([7, 8], [-1, 0]), session.prefill_or_extend(5, [9])[None]]
    finally:
        torch.set_default_dtype(before)
    assert {each.dtype for each in rows} == {np.dtype(np.float32)}
    assert_close(rows[0][1], expected([*text(5), 7, 8]))
    assert_close(rows[1][0], expected([*text(5), 9]))


@pytest.mark.parametrize("precision", ["float32", "int8"])
@settings(max_examples=10)
@given(data=st.data())
def test_several_texts_in_one_pass_are_what_each_is_alone_bit_by_bit(precision, data):
    """Texts of any length, one longer than what may be shared in a pass, one that runs along a branch."""
    model = drafter("nine heads on three", precision)
    lengths = data.draw(st.lists(st.integers(1, 80), min_size=2, max_size=6))
    together, alone = [model.open() for _ in lengths], [model.open() for _ in lengths]
    texts = [text(length, seed=number) for number, length in enumerate(lengths)]
    branch_ids = [[3 + number, 4][: 1 + number % 2] for number in range(len(lengths))]

    advanced = model.prefill_or_extend_all([(session, 0, ids) for session, ids in zip(together, texts, strict=True)])
    branched = model.branch_all(
        [(each, ids, range(-1, len(ids) - 1)) for each, ids in zip(together, branch_ids, strict=True)]
    )
    followed = model.prefill_or_extend_all(
        [(session, len(ids), [3 + number]) for number, (session, ids) in enumerate(zip(together, texts, strict=True))]
    )

    for number, session in enumerate(alone):
        assert np.array_equal(advanced[number], session.prefill_or_extend(0, texts[number]))
        assert np.array_equal(
            branched[number], session.branch(branch_ids[number], range(-1, len(branch_ids[number]) - 1))
        )
        assert np.array_equal(followed[number], session.prefill_or_extend(len(texts[number]), [3 + number]))
