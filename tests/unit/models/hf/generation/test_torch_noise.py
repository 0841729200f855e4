"""The noise of a `generate` call is that of torch's generator, whoever looks ahead."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.hf.generation.torch_noise import TorchNoise

VOCAB, ROWS, STEPS = 50, 3, 40
START = 7
CPU = torch.device("cpu")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), looked_at=st.lists(st.integers(0, STEPS + 10), max_size=10))
def test_rows_draw_what_multinomial_draws_for_the_batch(seed: int, looked_at: list[int]) -> None:
    """Also where drafts looked at other steps before, more of them than are kept."""
    torch.manual_seed(seed)
    p_SBV = torch.randn(STEPS, ROWS, VOCAB).softmax(dim=-1)
    before = torch.get_rng_state()
    expected = [torch.multinomial(p_BV, 1).squeeze(1).tolist() for p_BV in p_SBV]
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    noise = TorchNoise(ROWS, VOCAB, CPU)
    for step in looked_at:
        noise.row(0, START).exponentials(START + step, np.array([1, 2]))
    ids = np.arange(VOCAB)
    drawn = [
        [noise.row(row, START).draw(ids, p_SBV[step, row].numpy(), START + step) for row in range(ROWS)]
        for step in reversed(range(STEPS))
    ]
    assert drawn[::-1] == expected
    assert torch.equal(torch.get_rng_state(), before)
    noise.finish(STEPS)
    assert torch.equal(torch.get_rng_state(), after)


def test_drafts_see_the_noise_that_decides_the_draw() -> None:
    noise = TorchNoise(1, VOCAB, CPU).row(0, 0)
    ids, p_V = np.arange(VOCAB), np.full(VOCAB, 1 / VOCAB, np.float32)
    assert noise.draw(ids, p_V, 3) == noise.exponentials(3, ids).argmin()
    assert noise.draw(np.array([9]), np.ones(1), 3) == 9
