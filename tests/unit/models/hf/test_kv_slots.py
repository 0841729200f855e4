"""The slots of keys and values, without a model."""

import torch

from omnidraft.models.hf.kv_slots import KvSlots


def keys(*numbers: float) -> torch.Tensor:
    """One head of size one. [1, 1, S, 1]"""
    return torch.tensor(numbers)[None, None, :, None]


def write(slots: KvSlots, start: int, visible: int, *numbers: float) -> list[float]:
    slots.set_range(start, visible)
    seen, values = slots.update(keys(*numbers), keys(*numbers) * 10, 0)
    assert torch.equal(values, seen * 10)
    return seen.flatten().tolist()


def test_a_pass_writes_from_its_start_and_reads_what_is_visible():
    slots = KvSlots(1, 6)
    assert write(slots, 0, 3, 1, 2, 3) == [1, 2, 3]
    assert write(slots, 3, 5, 4, 5) == [1, 2, 3, 4, 5]


def test_slots_nobody_wrote_are_zero_so_that_nothing_leaks_through_a_mask():
    assert write(KvSlots(1, 5), 0, 5, 7) == [7, 0, 0, 0, 0]


def test_a_rejected_draft_is_written_over():
    slots = KvSlots(1, 6)
    write(slots, 0, 4, 1, 2, 3, 4)
    assert write(slots, 2, 4, 8, 9) == [1, 2, 8, 9]


def test_gather_moves_a_path_together():
    slots = KvSlots(2, 8)
    for layer in (0, 1):
        slots.set_range(0, 6)
        slots.update(keys(0, 1, 2, 3, 4, 5), keys(0, 10, 20, 30, 40, 50), layer)
    slots.gather([2, 3, 5], start=2)
    for layer in (0, 1):
        slots.set_range(5, 6)
        seen, values = slots.update(keys(9), keys(90), layer)
        assert seen.flatten().tolist() == [0, 1, 2, 3, 5, 9]
        assert torch.equal(values, seen * 10)


def test_gather_works_on_what_a_model_wrote_in_inference_mode():
    slots = KvSlots(1, 4)
    with torch.inference_mode():
        write(slots, 0, 4, 1, 2, 3, 4)
    slots.gather([0, 2], start=0)
    with torch.inference_mode():
        assert write(slots, 2, 3, 7) == [1, 3, 7]


@torch.inference_mode()
def test_grown_slots_hold_the_same_and_have_room():
    slots = KvSlots(1, 2)
    with torch.inference_mode():
        write(slots, 0, 2, 1, 2)
    larger = slots.enlarged(5)
    assert write(larger, 2, 5, 3) == [1, 2, 3, 0, 0]
    assert write(slots, 1, 2, 9) == [1, 9]
    assert KvSlots(1, 2).enlarged(3).capacity == 3


def test_a_layer_that_reads_the_keys_of_another_has_none_to_move_or_copy():
    """As the last layers of Gemma 3n and 4 do."""
    slots, copied = KvSlots(2, 4, num_rows=2), KvSlots(2, 4)
    rows = torch.arange(8.0).reshape(2, 1, 4, 1)
    slots.set_range(0, 4)
    slots.update(rows, rows * 10, 0)
    slots.spread(1, 0, 1)
    slots.gather([0, 2], start=0)
    copied.copy(slots, 2)
    assert copied.layers[0].keys.flatten().tolist() == [4, 2, 0, 0]
    assert copied.layers[1].keys is None


def test_the_length_transformers_asks_for_is_that_before_the_pass():
    slots = KvSlots(1, 8)
    slots.set_range(3, 5)
    assert slots.get_seq_length() == 3
    assert slots.get_mask_sizes(2, 0) == (5, 0)


def test_a_pass_of_one_row_writes_into_all_rows_and_reads_its_own():
    slots = KvSlots(1, 4, num_rows=3)
    assert write(slots, 0, 2, 1, 2) == [1, 2]
    slots.set_range(2, 3)
    seen, _ = slots.update(torch.tensor([7.0, 8.0, 9.0])[:, None, None, None], torch.zeros(3, 1, 1, 1), 0)
    assert seen.flatten(1).tolist() == [[1, 2, 7], [1, 2, 8], [1, 2, 9]]


def test_spread_gives_all_rows_the_slots_of_one_and_no_others():
    slots = KvSlots(2, 4, num_rows=3)
    rows = torch.arange(12.0).reshape(3, 1, 4, 1)
    for layer in (0, 1):
        slots.set_range(0, 4)
        slots.update(rows, rows * 10, layer)
    slots.spread(1, 1, 2)
    expected = [[0, 5, 6, 3], [4, 5, 6, 7], [8, 5, 6, 11]]
    for layer in slots.layers:
        assert layer.keys.flatten(1).tolist() == expected
        assert torch.equal(layer.values, layer.keys * 10)
