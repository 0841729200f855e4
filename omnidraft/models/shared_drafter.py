"""The base drafter, which is in memory once for all the targets it serves."""

import weakref
from collections.abc import Callable
from threading import Lock

from omnidraft.ports import DraftModel


class SharedDrafter:
    """Loads the model at the first call and shares it through a weak reference, as long as somebody uses it.

    A DraftModel has no state but its weights, so any number of snapshots may use it. Its memory is freed once every
    target serves learned weights.
    """

    def __init__(self, load: Callable[[], DraftModel]) -> None:
        self._load = load
        self._loaded: weakref.ref[DraftModel] | None = None
        self._lock = Lock()

    def get(self) -> DraftModel:
        """Return the model. Any thread may call; while one loads, the others wait for the same model."""
        with self._lock:
            model = self._loaded() if self._loaded is not None else None
            if model is None:
                model = self._load()
                self._loaded = weakref.ref(model)
            return model
