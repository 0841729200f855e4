"""The order of what a rotary embedding turns, in llama.cpp's files."""

import numpy as np

from omnidraft.models.llamacpp.gguf_export import _interleaved


def test_a_bias_is_in_the_order_of_the_rows_that_it_is_added_to() -> None:
    rows = np.arange(16.0)
    matrix = np.stack([rows, rows + 100], axis=1)
    assert _interleaved(matrix, 2)[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.array_equal(_interleaved(rows, 2), _interleaved(matrix, 2)[:, 0])
