"""The threads of a decoding worker beside decoding and HTTP, and what of it all has to be alive."""

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from omnidraft.supervised_thread import Supervised, SupervisedThread

if TYPE_CHECKING:
    from omnidraft.wiring import Worker


def refresher_threads(worker: "Worker", stop: threading.Event) -> list[SupervisedThread]:
    """One for each target that follows its champion, not yet started; they hear the control log too."""
    return [
        SupervisedThread(
            partial(each.refresher.run, stop), name=f"refresher of {each.engine.pair.target}", is_over=stop.is_set
        )
        for each in worker.served
        if each.refresher is not None
    ]


def vital_parts(worker: "Worker", refreshers: Sequence[SupervisedThread]) -> list[Supervised]:
    """What a worker's health is told from, beside its queue."""
    return [*refreshers, *([worker.recorder] if worker.recorder is not None else [])]
