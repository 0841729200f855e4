"""What transformers reads faster is what it read before, to the bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.catalog import gguf_speedups
from tests.tiny_gguf import write_gguf
from tests.unit.models.tiny import tiny_model

BLOCKWISE = [
    gguf.GGMLQuantizationType.Q4_0,
    gguf.GGMLQuantizationType.Q8_0,
    gguf.GGMLQuantizationType.Q4_K,
    gguf.GGMLQuantizationType.Q5_K,
    gguf.GGMLQuantizationType.Q6_K,
]
PLAIN = [gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16]


@settings(max_examples=20)
@given(
    kind=st.sampled_from(BLOCKWISE),
    shape=st.sampled_from([(1,), (3,), (gguf_speedups.ROWS + 1,), (2, 5), (2, gguf_speedups.ROWS)]),
    num_blocks=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_blocks_give_the_values_of_the_package_gguf(
    kind: gguf.GGMLQuantizationType, shape: tuple[int, ...], num_blocks: int, seed: int
) -> None:
    row_bytes = gguf.GGML_QUANT_SIZES[kind][1] * num_blocks
    data = np.random.default_rng(seed).integers(0, 256, (*shape, row_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):  # of random scales some are no numbers
        expected = gguf.quants.dequantize(data, kind)
    np.testing.assert_array_equal(gguf_speedups.dequantize(data, kind), expected)


@pytest.mark.parametrize("kind", PLAIN)
def test_values_that_are_not_quantised_stay_what_they_are(kind: gguf.GGMLQuantizationType) -> None:
    values = np.random.default_rng(0).normal(size=(4, 32)).astype(np.float32)
    data = gguf.quants.quantize(values, kind)
    np.testing.assert_array_equal(gguf_speedups.dequantize(data, kind), gguf.quants.dequantize(data, kind))


def test_a_file_is_read_once_with_the_same_fields_and_tensors(tmp_path: Path) -> None:
    file = write_gguf(tiny_model("qwen2"), tmp_path / "tiny.gguf")
    slow = gguf.GGUFReader(file)
    with gguf_speedups.applied():
        fast = gguf.GGUFReader(file)
        assert gguf.GGUFReader(str(file)) is fast
    assert list(fast.fields) == list(slow.fields)
    assert [field.contents() for field in fast.fields.values()] == [field.contents() for field in slow.fields.values()]
    for mine, theirs in zip(fast.tensors, slow.tensors, strict=True):
        assert (mine.name, mine.tensor_type) == (theirs.name, theirs.tensor_type)
        np.testing.assert_array_equal(mine.data, theirs.data)


def test_the_package_is_as_it_was_after_a_failure() -> None:
    before = gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize
    with pytest.raises(FileNotFoundError), gguf_speedups.applied():
        gguf.GGUFReader("no-such-file.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map, gguf.dequantize) == before
