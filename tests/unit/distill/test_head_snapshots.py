"""A distiller whose drafter has a head: the head travels in its snapshots, and a killed run loses nothing of it."""

from pathlib import Path

import pytest
import torch

from omnidraft.models.acceptance_head import PREFIX
from omnidraft.ports import Outgoing
from omnidraft.snapshots import bundle
from omnidraft.testing.memory_log import MemoryWriter
from omnidraft.traces import codec
from tests.distiller_runs import TEXTS, Killed, Setting, names, run_until_idle
from tests.unit.distill.drafted import with_drafts


def emit(setting: Setting, num: int) -> None:
    for number, name in enumerate(names(num)):
        record = with_drafts(setting.pair, setting.pair.record(name, TEXTS[number % 3]), seed=number)
        message = Outgoing(codec.key(record), codec.encode(record), codec.headers(record))
        MemoryWriter(setting.log, "t").append([message])


def serving(setting: Setting) -> dict[str, torch.Tensor]:
    found = bundle.serving_tensors(setting.fetched())
    assert found is not None
    return found


def test_a_killed_and_resumed_run_has_the_head_of_an_uninterrupted_one(pair, tmp_path: Path) -> None:
    whole, broken = (Setting(pair, tmp_path / name, head=True) for name in ("whole", "broken"))
    for setting in (whole, broken):
        emit(setting, 12)
    run_until_idle(whole.distiller()[0])
    with pytest.raises(Killed):
        run_until_idle(broken.distiller(die_after=3)[0])
    run_until_idle(broken.distiller()[0])
    for left, right in ((whole.masters(), broken.masters()), (serving(whole), serving(broken))):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert any(name.startswith(PREFIX) for name in serving(whole))
    assert "head" in whole.manifest().losses
