"""Records that are sound in form and lie, by whoever may write to the trace topic: others are learned from all the
same, and what is learned stays finite."""

import random
from pathlib import Path

import pytest

from omnidraft.ports import Outgoing
from omnidraft.testing.memory_log import MemoryWriter
from omnidraft.traces import codec
from tests.distiller_runs import Setting, learned, names, run_until_idle
from tests.soak import hostile_messages


@pytest.mark.parametrize("learner", [{}, {"head": True}, {"train": "lora", "factor_tenants": 4}], ids=str)
@pytest.mark.parametrize("about", hostile_messages.LIES, ids=lambda about: about.__name__)
def test_a_lie_beside_each_record_keeps_no_other_from_being_learned(pair, tmp_path: Path, about, learner) -> None:
    setting, rng, honest = Setting(pair, tmp_path, **learner), random.Random(1), names(8)
    for name in honest:
        setting.emit(name, temperature=rng.choice((0.01, 0.5, 1.0, 2.0)))
        record = setting.record(name, temperature=rng.choice((0.01, 0.5, 1.0, 2.0)))
        message = Outgoing(codec.key(record), codec.encode(record), codec.headers(record))
        MemoryWriter(setting.log, "t").append([hostile_messages.lying(message, rng, about)])
    distiller, journal = setting.distiller(held_out_every=0)
    run_until_idle(distiller)
    assert set(honest) <= set(learned(journal))
    assert all(tensor.isfinite().all() for tensor in setting.masters().values())
    assert "not_finite" not in setting.manifest().counts
