"""Settings of a fleet around two tiny random models, quick enough to be killed a hundred times."""

from pathlib import Path

LEARNER_STEP_RECORDS = 4


def make(folder: Path) -> str:
    """The models, unless they are there, and the sections of the settings that name them."""
    from omnidraft.testing.tiny_models import make_drafter, make_target

    target, drafter = folder.absolute() / "target", folder.absolute() / "drafter"
    if not drafter.exists():
        make_target(target, spread=0.3)
        make_drafter(drafter)
    return f"""\
[models]
target = "{target}"
drafter = "{drafter}"
precision = "float32"
drafter_precision = "float32"
[decode]
threads = 1
prefill_rows = 16
mode = "reproducible"
[learner]
records_per_step = {LEARNER_STEP_RECORDS}
steps_per_snapshot = 8
held_out_every = 8
learning_rate = 1e-3
threads = 1
nice = 5
[controller]
poll_s = 0.5
tolerance = 1.0
[worker]
poll_s = 0.5
"""
