"""The distiller's actor without Ray around it."""

import logging
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from omnidraft import assembly, config
from omnidraft.distill.control import TrainingControl
from omnidraft.errors import ConfigError
from omnidraft.hosts.ray_actor import DistillerActor, WarningBuffer, _limit_resources, gate
from omnidraft.ports import Drift
from omnidraft.testing.memory_log import MemoryLog
from tests.control_logs import control_over


def test_a_warning_that_cannot_be_formatted_raises_nothing_and_loses_no_other() -> None:
    buffer, logger = WarningBuffer(), logging.Logger("a library")
    logger.addHandler(buffer)
    logger.warning("x", FutureWarning)
    logger.warning("%d records", 3)
    assert buffer.take() == [(logging.WARNING, "3 records")]


def test_what_a_learner_warned_of_before_it_failed_to_start_is_in_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def distillation(*args: Any, **options: Any) -> None:
        logging.getLogger("omnidraft").warning("the process before crashed")
        raise ConfigError("no such loss")

    monkeypatch.setattr(assembly, "distillation", distillation)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    actor = DistillerActor(config.load(None, {}), str(tmp_path))
    with ThreadPoolExecutor(1) as pool, pytest.raises(ConfigError, match="no such loss"):
        pool.submit(actor.run).result()  # the priority is the thread's
    assert actor.status()["warnings"] == [(logging.WARNING, "the process before crashed")]
    last = actor.status()
    assert last["warnings"] == []
    assert last["memory_bytes"] > 2**20
    assert last["available_bytes"] > 2**20


@pytest.mark.parametrize(("threads", "expected"), [(None, 1), (2, 2)])
def test_a_learner_computes_on_the_threads_of_its_settings_else_on_one(threads: int | None, expected: int) -> None:
    def limited() -> int:
        torch.set_num_threads(3)
        _limit_resources(config.LearnerSettings(threads=threads))
        return torch.get_num_threads()

    before = torch.get_num_threads()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(limited).result() == expected
    torch.set_num_threads(before)


@pytest.mark.parametrize("is_drifting", [False, True])
def test_learning_gives_way_to_decoding_unless_a_tenants_traffic_drifts(
    monkeypatch: pytest.MonkeyPatch, is_drifting: bool
) -> None:
    control = TrainingControl(control_over(log := MemoryLog()))
    if is_drifting:
        control_over(log).put(("drift", "a", "text"), Drift(level=0.9))
    control.poll()
    pauses = list[float]()
    monkeypatch.setattr("omnidraft.throttle.decodes", lambda: True)
    monkeypatch.setattr("omnidraft.throttle.Courtesy._WORK_S", 0.0)
    monkeypatch.setattr("omnidraft.throttle.time.sleep", pauses.append)
    gate(control)()
    assert len(pauses) == (not is_drifting)
