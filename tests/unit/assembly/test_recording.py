"""The redactor of the settings: loaded with the worker, refused with it, and at work in what it writes."""

import sys
from pathlib import Path

import pytest

from omnidraft import assembly, config
from omnidraft.assembly.recording import redactor
from omnidraft.decode.generation import GenerationRequest
from omnidraft.errors import ConfigError
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from omnidraft.traces.redaction import hashed_tenant
from tests.tiny_engine import tiny_settings


def named(name: str) -> config.Settings:
    return config.load(None, {}, recorder={"redactor": name})


def test_none_is_named_unless_it_is_asked_for():
    assert redactor(config.load(None, {})) is None


def test_a_function_is_found_by_its_module_and_name():
    assert redactor(named("omnidraft.traces.redaction:hashed_tenant")) is hashed_tenant


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("omnidraft.traces.redaction:no_such_function", "has no attribute 'no_such_function'"),
        ("omnidraft.params:MAX_COUNT", "is a int, not a function"),
        ("breaks_when_imported:f", "importing it raised ZeroDivisionError"),
    ],
)
def test_a_redactor_that_cannot_be_had_is_refused_by_name(name, said, tmp_path, monkeypatch):
    (tmp_path / "breaks_when_imported.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refused:
        redactor(named(name))
    assert name in str(refused.value)
    assert said in str(refused.value)


@pytest.mark.parametrize("name", ["module", "module:", ":f", "a b:c", "module.f()", "m:1f", "m:f:g", ""])
def test_what_is_no_name_of_a_function_is_refused_with_the_settings(name):
    with pytest.raises(ConfigError, match=r"recorder\.redactor: not a function"):
        named(name)


def test_a_worker_with_a_bad_redactor_does_not_start(tiny_models: tuple[Path, Path], tmp_path: Path):
    asked = tiny_settings(
        tiny_models, log={"url": f"sqlite:///{tmp_path}/log.db"}, recorder={"redactor": "no_such_module:f"}
    )
    with pytest.raises(ConfigError, match="no_such_module"):
        assembly.worker(asked, CountingMetrics())


def test_what_a_worker_writes_went_through_the_operators_redactor(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "operators_own.py").write_text(
        "from dataclasses import replace\n"
        "def redact(record):\n"
        "    return None if record.tenant == 'secret' else replace(record, worker='hidden')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    where = {"log": {"url": f"sqlite:///{tmp_path}/log.db"}, "registry": {"url": f"directory:///{tmp_path}/registry"}}
    settings = tiny_settings(tiny_models, recorder={"redactor": "operators_own:redact"}, **where)
    worker = assembly.worker(settings, CountingMetrics())
    for tenant in ("open", "secret"):
        list(worker.engine.stream(GenerationRequest("Natalia", max_new_tokens=4, tenant=tenant)).steps)
    assert worker.producer is not None
    assert worker.producer.close(5.0) == 0
    messages = assembly.log_reader(settings, settings.log.traces_topic).poll(10, timeout_s=1.0).messages
    records = [codec.decode(message.value, message.headers) for message in messages]
    assert [(record.tenant, record.worker) for record in records] == [("open", "hidden")]
    sys.modules.pop("operators_own")
