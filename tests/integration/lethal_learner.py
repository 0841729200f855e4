"""A learner's process in which one record is lethal: `python -m tests.integration.lethal_learner FOLDER OFFSET`.

It dies by SIGKILL wherever the drafter reads LETHAL, as by a fault in native code, and stops by itself once a snapshot
is past OFFSET of partition 0. Where another learner took over it says so and exits with 1.
"""

import os
import signal
import sys
import threading
import time
from typing import Any

from omnidraft import assembly, config
from omnidraft.errors import SnapshotStale
from omnidraft.hosts.ray_actor import DistillerActor
from omnidraft.models.hf import trainable_drafter
from omnidraft.ports import PackedTexts

LETHAL = (81, 82, 83)
"""Draft ids, in this order; another must follow, since the last one of a prompt is read apart."""


def lethal(hidden: Any) -> Any:
    def read(self: Any, texts: PackedTexts) -> Any:
        if str(list(LETHAL))[1:-1] in str(texts.ids_R.tolist()):
            os.kill(os.getpid(), signal.SIGKILL)
        return hidden(self, texts)

    return read


def main(folder: str, offset: int) -> None:
    drafter = trainable_drafter.TransformersTrainable
    drafter.hidden = lethal(drafter.hidden)  # type: ignore[method-assign]
    settings = config.load()
    actor = DistillerActor(settings, folder)

    def stop_when_learned() -> None:
        while True:
            time.sleep(0.2)
            versions = assembly.registry(settings).versions()
            if versions and versions[-1].manifest.offsets.get(0, 0) >= offset:
                actor.stop()
                return

    threading.Thread(target=stop_when_learned, daemon=True).start()
    try:
        actor.run()
    except SnapshotStale as exc:
        sys.exit(str(exc))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
