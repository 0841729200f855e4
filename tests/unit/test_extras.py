"""Whoever needs an optional part of the package reads which command installs it; whoever does not never notices."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from omnidraft import assembly, config, extras
from omnidraft.assembly.recording import tracing
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.errors import ExtraMissing, SnapshotNotFound
from omnidraft.models.llamacpp import context

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-") for requirement in requirements}


@pytest.fixture
def without(monkeypatch):
    """Make an extra's packages impossible to find."""

    def remove(extra: str) -> None:
        for module in extras.MODULES[extra]:
            for name in {module, module.partition(".")[0]}:  # an earlier test may have imported the module
                monkeypatch.setitem(sys.modules, name, None)

    return remove


def test_every_extra_that_the_code_knows_brings_its_modules():
    packages = packages_distributions()
    for extra, modules in extras.MODULES.items():
        bring = names(PROJECT["optional-dependencies"][extra])
        for module in modules:
            if (installed := packages.get(module)) is not None:
                assert {name.lower() for name in installed} & bring, extra


def test_all_extras_but_those_with_an_environment_of_their_own_are_in_all():
    (everything,) = PROJECT["optional-dependencies"]["all"]
    inside = set(re.search(r"\[(.*)\]", everything)[1].split(","))
    assert set(PROJECT["optional-dependencies"]) - inside == {"all", "dev", "llamacpp", "vllm"}


def test_a_laptop_gets_neither_ray_nor_mlflow():
    assert not {"ray", "mlflow", "kafka-python", "fastapi", "vllm", "llama-cpp-python"} & names(PROJECT["dependencies"])


@pytest.mark.parametrize(
    ("extra", "use"),
    [
        ("kafka", lambda: assembly.log_reader(config.load(None, {}, log={"url": "kafka://nowhere:9092"}), "topic")),
        ("mlflow", lambda: assembly.registry(config.load(None, {}))),
        ("mlflow", lambda: snapshot_reader(config.load(None, {}, registry={"url": "http://nowhere:5000"}))),
        ("otel", lambda: tracing(config.load(None, {}, tracing={"endpoint": "http://nowhere:4318"}), "worker", None)),
        ("llamacpp", context.library),
    ],
)
def test_what_is_missing_is_named_with_its_command_in_one_line(extra, use, without):
    without(extra)
    with pytest.raises(ExtraMissing, match=rf"^[^\n]+ needs [^\n]*: pip install 'omnidraft\[{extra}\]'$"):
        use()


def test_a_worker_serves_its_base_drafter_without_mlflow(without, tmp_path):
    without("mlflow")
    reader = snapshot_reader(config.load(None, {}, registry={"url": f"sqlite:///{tmp_path}/mlflow.db"}))
    with pytest.raises(SnapshotNotFound):
        reader.resolve("champion")
    assert list(tmp_path.iterdir()) == []


def test_a_worker_does_not_ignore_a_registry_that_it_cannot_read(without, tmp_path):
    without("mlflow")
    (tmp_path / "mlflow.db").touch()
    with pytest.raises(ExtraMissing, match="mlflow"):
        snapshot_reader(config.load(None, {}, registry={"url": f"sqlite:///{tmp_path}/mlflow.db"}))


@pytest.mark.parametrize("url", ["mysql+no_driver://db/x", "postgresql+no_driver://db/x"])
def test_a_registry_whose_driver_is_not_installed_is_refused_before_it_is_read(url):
    settings = config.load(None, {}, registry={"url": url, "artifacts": "/tmp/artifacts"})
    with pytest.raises(ExtraMissing, match=r"^registry\.url needs the Python package no_driver"):
        snapshot_reader(settings)
