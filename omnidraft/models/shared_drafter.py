"""The base drafter, in memory once for all the targets it serves."""

import weakref
from collections.abc import Callable
from threading import Lock

from omnidraft.ports import DraftModel


class SharedDrafter:
    """Loads when first asked, gives everybody the same model, and keeps it as long as somebody holds it.

    A DraftModel has no state but its weights, so any number of snapshots may serve it. Once every target has learned
    weights in place, its memory is free again.
    """

    def __init__(self, load: Callable[[], DraftModel]) -> None:
        self._load = load
        self._known: weakref.ref[DraftModel] | None = None
        self._lock = Lock()

    def get(self) -> DraftModel:
        """Any thread may ask; while one loads, the others wait for the same model."""
        with self._lock:
            model = self._known() if self._known is not None else None
            if model is None:
                model = self._load()
                self._known = weakref.ref(model)
            return model
