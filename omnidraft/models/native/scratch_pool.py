"""Scratch memory for passes: one piece for each pass that runs at the same time, whatever the number of texts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ScratchPool:
    """Lends memory that is freed with the pool. Any thread may take some."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []

    @contextmanager
    def take(self, num_bytes: int) -> Iterator[torch.Tensor]:
        """Lend at least so many bytes, with any content."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = torch.empty(0, dtype=torch.uint8)
        if len(memory) < num_bytes:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        try:
            yield memory
        finally:
            self._free.append(memory)
