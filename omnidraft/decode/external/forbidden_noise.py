"""The noise of an engine that draws with its own: nobody may look at it."""

import numpy as np

from omnidraft.errors import ContractError


class ForbiddenNoise:
    """Implements ports.Noise for proposers that must not use any."""

    def draw(self, ids_M: np.ndarray, p_M: np.ndarray, position: int) -> int:
        """Raises ContractError."""
        raise ContractError("the engine draws with its own noise, which nobody here knows")

    def exponentials(self, position: int, ids: np.ndarray) -> np.ndarray:
        """Raises ContractError."""
        raise ContractError("the engine draws with its own noise, which nobody here knows")
