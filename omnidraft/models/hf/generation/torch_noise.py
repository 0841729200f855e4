"""The noise of torch's own random numbers, as `generate` would use them: the same seed gives the same text.

`torch.multinomial` draws one of a row's ids by the exponential race: it fills a tensor of the probabilities' shape with
Exp(1) variables E and takes argmax p / E. `generate` calls it once a step for all rows, so the noise of step k is the
k-th such tensor, whatever is drafted. Drafts may look ahead; the state of the generator afterwards is as if nothing
had been drafted.
Shapes: B rows of the batch, V vocabulary, M ids that take part.
"""

import numpy as np
import torch

_CACHED_STEPS = 32


class TorchNoise:
    """The noise of all rows of a batch, from the state of torch's generator on this device."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_rows, vocab_size)
        self._device = device
        self._generator = torch.Generator(device)
        self._states = [_rng_state(device)]
        """The state before each step that was drawn, and before the next one."""
        self._cached: dict[int, torch.Tensor] = {}

    def row(self, row: int, start: int) -> "RowNoise":
        """Return the noise of one row, whose first draw is at position `start`."""
        return RowNoise(self, row, start)

    def exponentials(self, step: int) -> torch.Tensor:
        """Return the Exp(1) variables of a step, float32 [B, V]."""
        while step >= len(self._states) - 1:
            self._draw(len(self._states) - 1)
        return self._cached[step] if step in self._cached else self._draw(step)

    def finish(self, num_steps: int) -> None:
        """Leave torch's generator as so many steps without drafts leave it."""
        if num_steps:
            self.exponentials(num_steps - 1)
        _set_rng_state(self._states[num_steps], self._device)

    def _draw(self, step: int) -> torch.Tensor:
        self._generator.set_state(self._states[step])
        drawn_BV = torch.empty(self._shape, device=self._device).exponential_(1, generator=self._generator).cpu()
        if step == len(self._states) - 1:
            self._states.append(self._generator.get_state())
        while len(self._cached) >= _CACHED_STEPS:
            del self._cached[min(self._cached)]
        self._cached[step] = drawn_BV
        return drawn_BV


class RowNoise:
    """Implements ports.Noise for one row of a batch."""

    def __init__(self, noise: TorchNoise, row: int, start: int) -> None:
        self._noise = noise
        self._row = row
        self._start = start

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """See ports.Noise; the probabilities are float32, and a single id wins without a race."""
        if len(ids_M) == 1:
            return int(ids_M[0])
        return int(ids_M[int(torch.from_numpy(p_M).div(self._at(position)[torch.from_numpy(ids_M)]).argmax())])

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """See ports.Noise."""
        drawn: np.ndarray = self._at(position)[torch.from_numpy(np.asarray(ids, np.int64))].double().numpy()
        return drawn

    def _at(self, position: int) -> torch.Tensor:
        return self._noise.exponentials(position - self._start)[self._row]


def _rng_state(device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_rng_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
