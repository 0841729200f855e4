"""The distiller's supervision of its actors, without a cluster."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnidraft import config
from omnidraft.hosts.distiller import _LearnerActor, _watch

STATUS = {
    "pid": 7,
    "metrics": "",
    "warnings": [(logging.WARNING, "the newest snapshot is not published")],
    "version": None,
    "num_records": 0,
    "num_tokens": 0,
    "num_steps": 0,
    "losses": {},
    "agreement": None,
}


class ShortLivedActor:
    """Answered a first time before it had begun; then its `run` warned and returned. A call's ref is a function that
    returns the answer."""

    def __init__(self) -> None:
        answers = iter([None, STATUS])
        self.run = SimpleNamespace(remote=lambda: lambda: None)
        self.status = SimpleNamespace(remote=lambda: lambda: next(answers))


def test_the_last_warnings_of_a_learner_that_ends_are_in_the_distillers_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ray = pytest.importorskip("ray")

    def get(ref: Callable[[], Any], *, timeout: float | None = None) -> Any:
        return ref()

    actor_class = SimpleNamespace(remote=lambda settings, folder: ShortLivedActor())
    monkeypatch.setattr(ray, "remote", lambda **options: lambda cls: actor_class)
    monkeypatch.setattr(ray, "wait", lambda refs, **options: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    learner = _LearnerActor(config.Settings(), tmp_path)
    _watch([learner], threading.Event())
    assert f"{learner.target}: the newest snapshot is not published" in caplog.messages
