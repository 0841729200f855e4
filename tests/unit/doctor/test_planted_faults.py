"""Every check of the doctor names the fault that was planted for it, and says what to do."""

import json
import os
import py_compile
import shutil
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.fernet import Fernet
from fastapi import FastAPI

from omnidraft import assembly, config, system
from omnidraft.doctor import all_checks, installation, log, machine, models, registry
from omnidraft.doctor.finding import Finding, Verdict, run_check
from omnidraft.errors import KernelsUnavailable
from omnidraft.models.catalog import gguf_conversion
from omnidraft.models.catalog.install import Origin
from omnidraft.models.probe import choice
from omnidraft.models.probe.choice import Kernels, TorchProducts
from omnidraft.models.probe.subprocess_trial import Outcome
from omnidraft.ports import Outgoing
from tests.homes import make_home
from tests.http_server import served
from tests.snapshot_folders import make_bundle
from tests.tiny_engine import tiny_settings

KEY = Fernet.generate_key().decode()


@pytest.fixture
def settings(
    tiny_models: tuple[Path, Path], omnidraft_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> config.Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return of(tiny_models, tmp_path)


def of(pair: tuple[Path, Path], tmp_path: Path, **sections: Any) -> config.Settings:
    places = {"log": {"url": f"sqlite:///{tmp_path}/log.db"}, "registry": {"url": f"directory:///{tmp_path}/registry"}}
    return tiny_settings(pair, **(places | sections))


def publish(settings: config.Settings, tmp_path: Path, name: str = "s1", **fields: Any) -> None:
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    versions = assembly.registry(settings).versions()
    parent = versions[-1].version if versions else None
    assembly.registry(settings).publish(make_bundle(tmp_path, name, **pair, **fields), parent)


def write(settings: config.Settings, number: int = 3) -> None:
    writer = assembly.log_writer(settings, settings.log.traces_topic)
    writer.append([Outgoing(b"key", b"value")] * number)
    writer.close()


def assert_found(finding: Finding, verdict: Verdict, *words: str) -> None:
    assert finding.verdict is verdict, finding
    assert all(word in f"{finding.told} {finding.advice}" for word in words), finding
    assert (finding.advice is None) == (verdict is Verdict.OK)


def test_missing_and_outdated_libraries_are_named_and_those_of_unused_extras_are_not() -> None:
    wanted = ["numpy>=99", "rich>=1", "no-such-library>=1", 'nor-this>=1; extra == "kafka"']
    assert installation.unmet_requirements(wanted, ()) == [
        f"numpy is {installation.metadata.version('numpy')}, wanted >=99",
        "no-such-library is missing, wanted >=1",
    ]
    assert "nor-this is missing, wanted >=1" in installation.unmet_requirements(wanted, ["kafka"])


@pytest.mark.parametrize(
    ("sections", "extras"),
    [
        ({}, ()),
        ({"log": {"url": "kafka://h:1"}, "models": {"engine": "llamacpp"}}, ("kafka", "llamacpp")),
        ({"tracing": {"endpoint": "http://h:4318"}}, ("otel",)),
        ({"registry": {"url": "http://h:5000"}}, ("mlflow",)),
        ({"registry": {"url": "postgresql://h/mlflow"}}, ("mlflow", "postgres")),
        ({"log": {"key_store": "postgresql://h/k", "encryption_keys": [KEY]}}, ("postgres",)),
    ],
)
def test_settings_say_which_extras_are_needed(
    sections: dict[str, Any], extras: tuple[str, ...], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the default registry is not there
    assert installation.extras_needed(config.load(None, {}, **sections)) == extras


def test_an_extra_that_single_services_lack_is_a_warning() -> None:
    wanted = ["rich>=1", 'no-such-library>=1; extra == "serve"', 'nor-this>=1; extra == "otel"']
    assert_found(installation.libraries_finding(wanted, [], {}), Verdict.OK)
    found = installation.libraries_finding(wanted, [], {"serve": "worker"})
    assert_found(found, Verdict.WARNING, "no-such-library is missing", "no worker can start", "'omnidraft[serve]'")
    found = installation.libraries_finding(wanted, ["otel"], {"serve": "worker"})
    assert_found(found, Verdict.PROBLEM, "nor-this is missing", "'omnidraft[otel,serve]'")
    found = installation.libraries_finding(["rich>=99", *wanted[:1]], [], {"serve": "worker"})
    assert_found(found, Verdict.PROBLEM, "rich is", "pip install --upgrade 'omnidraft'")


def test_this_environment_is_what_the_package_asks_for(settings: config.Settings) -> None:
    assert_found(installation.python(), Verdict.OK)
    assert_found(installation.libraries(settings), Verdict.OK)


def test_libraries_that_every_start_compiles_anew(tmp_path, monkeypatch) -> None:
    (tmp_path / "large.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert_found(installation.bytecode("large"), Verdict.WARNING, "PYTHONDONTWRITEBYTECODE", "compileall")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert_found(installation.bytecode("large"), Verdict.OK, "first start")
    py_compile.compile(str(tmp_path / "large.py"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert_found(installation.bytecode("large"), Verdict.OK, "is compiled")


def test_a_compiler_that_is_not_there(settings: config.Settings, tiny_models, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert_found(machine.kernels(settings), Verdict.WARNING, "no-such-compiler", "install")
    needed = settings.model_copy(update={"models": settings.models.model_copy(update={"precision": "int8"})})
    assert_found(machine.kernels(needed), Verdict.PROBLEM, "no-such-compiler")


def test_kernels_that_do_not_work_beside_a_compiler(settings: config.Settings, monkeypatch) -> None:
    def unavailable(variant: str) -> Kernels:
        raise KernelsUnavailable("our kernels for avx2 could not be tried here, SIGKILL")

    monkeypatch.setattr(choice, "kernels", unavailable)
    found = machine.kernels(settings)
    assert_found(found, Verdict.WARNING, "SIGKILL", "at auto")
    assert "compiler" not in f"{found.told} {found.advice}"


def test_trials_compute_on_as_many_threads_as_a_worker(settings: config.Settings) -> None:
    assert settings.decode.threads == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert next(all_checks._checks(settings))[0] == "kernels"
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)


def test_a_processor_without_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch names them: its builds for ARM have vector instructions under these names."""
    sound = TorchProducts(None, Outcome({"float32": 0.002, "bfloat16": 0.001}), ())
    broken = TorchProducts(None, Outcome({"float32": 0.002}, wrong=["bfloat16 is off"]), ())
    for capability in ("NO AVX", "DEFAULT"):
        monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
        assert_found(machine.processor_finding(capability, sound), Verdict.WARNING, "vector", "AVX2")
        assert_found(machine.processor_finding(capability, broken), Verdict.WARNING, "bfloat16 is off")
        monkeypatch.setattr(machine.platform, "machine", lambda: "aarch64")
        assert_found(machine.processor_finding(capability, sound), Verdict.OK, f"{capability}, torch's products")
    assert_found(machine.processor_finding("AVX512", sound), Verdict.OK, "float32 2.00 ms, bfloat16 1.00 ms")


def test_a_processor_that_does_not_run_what_it_announces() -> None:
    limited = TorchProducts(
        "AVX2", Outcome({"float32": 0.002, "bfloat16": 0.001}), (("all instructions", "dies of X"),)
    )
    assert_found(
        machine.processor_finding("AVX512", limited), Verdict.WARNING, "kept to AVX2", "all instructions: dies"
    )
    broken = TorchProducts(None, Outcome({"float32": 0.002}, died_of="SIGILL (Illegal instruction)"), ())
    assert_found(machine.processor_finding("AVX512", broken), Verdict.WARNING, "torch dies of SIGILL")
    refused = Kernels("avx2", Path("x.so"), {"packed16": 0.001}, (("avx512", "dies of SIGILL"),))
    assert_found(machine.kernels_finding(refused), Verdict.WARNING, "compiled for avx2", "avx512: dies of SIGILL")


def test_this_processor(settings: config.Settings) -> None:
    assert machine.processor().told.startswith((torch.backends.cpu.get_cpu_capability(), "no vector instructions"))
    assert_found(machine.precision(settings), Verdict.OK)


@pytest.mark.parametrize(
    ("free", "verdict"), [(10, Verdict.PROBLEM), (2 * 10**9, Verdict.WARNING), (10**10, Verdict.OK)]
)
def test_a_disk_that_is_nearly_full(tmp_path: Path, free: int, verdict: Verdict) -> None:
    found = machine.disk("disk of the log", tmp_path / "not" / "there", 10**9, lambda folder: free)
    assert_found(found, verdict, str(tmp_path), "1.0 GB needed")


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)  # root may write everywhere
    found = machine.disk("disk of the log", tmp_path / "not" / "there", 10)
    assert_found(found, Verdict.PROBLEM, str(tmp_path), "cannot be written")


def test_every_local_folder_that_grows_is_looked_at(settings: config.Settings, tmp_path: Path) -> None:
    found = {what: (folder, needed) for what, folder, needed in machine.folders(settings)}
    assert list(found) == ["disk of the log", "disk of the registry", "disk of staging"]
    assert found["disk of the registry"][0] == tmp_path / "registry"
    assert found["disk of staging"][1] == 7 * models.weights_bytes(Path(settings.models.drafter)) > 0
    assert machine.disk("disk of the log", *found["disk of the log"]).verdict in set(Verdict)


def test_too_little_memory_for_the_models(settings: config.Settings) -> None:
    needed = 2 * sum(models.weights_bytes(Path(name)) for name in (settings.models.target, settings.models.drafter))
    assert_found(machine.memory(settings, lambda: needed - 1), Verdict.PROBLEM, "2 models", "int8")
    assert_found(machine.memory(settings, lambda: needed + 1), Verdict.WARNING)
    assert_found(machine.memory(settings, lambda: 2 * needed), Verdict.OK)


def test_a_container_with_less_memory_than_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert system.available_memory() > 1000
    for name, content in {"max": "3000", "current": "2500", "stat": "inactive_file 500"}.items():
        (tmp_path / f"memory.{name}").write_text(f"{content}\n")
    assert system.available_memory() == 1000


def test_llama_cpp_needs_memory_for_its_gguf_file(tiny_models, tmp_path: Path) -> None:
    file, drafter = tmp_path / "mine.gguf", models.weights_bytes(tiny_models[1])
    file.write_bytes(bytes(1000))
    for target in (file, tmp_path / "mine"):  # the file, and the folder beside it
        (tmp_path / "mine").mkdir(exist_ok=True)
        section = config.ModelSettings(target=str(target), drafter=str(tiny_models[1]), engine="llamacpp")
        settings = of(tiny_models, tmp_path).model_copy(update={"models": section})
        found = machine.memory(settings, lambda: 1000 + drafter - 1)
        assert_found(found, Verdict.PROBLEM, "2 models", "a GGUF file of fewer bits")
        assert "int8" not in str(found.advice)
        assert_found(machine.memory(settings, lambda: 1000 + drafter), Verdict.WARNING)
    file.unlink()
    assert_found(machine.memory(settings, lambda: drafter), Verdict.WARNING, "1 models")


def test_an_ensemble_needs_memory_for_all_its_members(settings: config.Settings, tiny_models) -> None:
    target, drafter = map(models.weights_bytes, tiny_models)
    section = settings.models.model_copy(
        update={"engine": "ensemble", "members": (str(tiny_models[0]),), "precision": "bfloat16"}
    )
    several, needed = settings.model_copy(update={"models": section}), 2 * target + 2 * drafter
    assert_found(machine.memory(several, lambda: needed - 1), Verdict.PROBLEM, "3 models", "fewer members", "int4")
    assert_found(machine.memory(several, lambda: needed), Verdict.WARNING)


def test_a_port_that_is_taken_by_something_else_or_not_ours(tiny_models, tmp_path: Path) -> None:
    with served(FastAPI()) as url:
        taken = of(tiny_models, tmp_path, worker={"port": int(url.rsplit(":", 1)[1])})
        assert_found(machine.port(taken), Verdict.PROBLEM, "in use", "no omnidraft worker", "worker.port")
    abroad = of(tiny_models, tmp_path, worker={"host": "203.0.113.1", "port": 8000})
    assert_found(machine.port(abroad), Verdict.PROBLEM, "203.0.113.1:8000 cannot be used")
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
    assert_found(machine.port(of(tiny_models, tmp_path, worker={"port": number})), Verdict.OK, "is free")


def test_a_model_that_is_not_installed_unknown_or_broken(tiny_models, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    assert_found(models.model("smollm2-135m"), Verdict.WARNING, "omnidraft models pull smollm2-135m")
    assert_found(models.model("smolm2-135m"), Verdict.PROBLEM, "did you mean smollm2-135m")
    assert_found(models.model(str(tiny_models[0])), Verdict.OK, "GB of weights")
    folder = tmp_path / "models" / "smollm2-135m"
    shutil.copytree(tiny_models[1], folder)
    (folder / "omnidraft.json").write_text(json.dumps(asdict(Origin("wheels", "another", gguf_conversion.VERSION))))
    assert_found(models.model("smollm2-135m"), Verdict.PROBLEM, "made from another", "b179c9523d")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    assert_found(models.model("smollm2-135m"), Verdict.PROBLEM, str(weights), "pull smollm2-135m")
    weights.unlink()
    assert_found(models.model("smollm2-135m"), Verdict.PROBLEM, "no weights")
    (folder / "config.json").unlink()
    assert_found(models.model("smollm2-135m"), Verdict.PROBLEM, "no config.json")


def test_a_gguf_file_that_is_not_the_catalogs(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
    assert_found(models.gguf("gemma3-270m"), Verdict.WARNING, "pull gemma3-270m --gguf")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gemma3-270m.gguf").write_bytes(b"something else")
    assert_found(models.gguf("gemma3-270m"), Verdict.PROBLEM, "a5fd3b62230aa5ec", "remove", "--gguf")
    found = run_check("GGUF file", lambda: models.gguf(str(tmp_path)))
    assert_found(found, Verdict.PROBLEM, "llama.cpp needs a GGUF file")


def test_packed_weights_with_a_flipped_byte(
    settings: config.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("OMNIDRAFT_HOME", str(make_home(home)))
    packing = settings.model_copy(update={"models": settings.models.model_copy(update={"precision": "int8"})})
    assert_found(models.packed(), Verdict.OK, "0 files")
    assembly.target(packing, assembly.vocabularies(packing))
    assert_found(models.packed(), Verdict.OK, "1 files")
    (path,) = (home / "packed").glob("*.safetensors")
    status = path.stat()
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_found(models.packed(), Verdict.PROBLEM, str(path), "checksum of sin", "remove")


def test_an_alignment_that_is_spoilt_is_built_again_and_a_champion_of_other_models_is_found(
    settings: config.Settings, tiny_models, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path / "home"))
    assert_found(models.alignment(settings), Verdict.OK, "draft tokens are one target token")
    (built,) = (tmp_path / "home" / "alignments").glob("*.npz")
    words = assembly.vocabularies(settings)
    ours = assembly.identity(settings, words)
    for number, (fields, verdict, told) in enumerate(
        (
            ({"alignment": "of others"}, Verdict.PROBLEM, "alignment of others"),
            ({"alignment": ours.alignment, "drafter_hash": "of others"}, Verdict.PROBLEM, "drafter of others"),
            ({"alignment": ours.alignment, "drafter_hash": ours.drafter_hash}, Verdict.OK, "installed"),
        ),
        start=1,
    ):
        publish(settings, tmp_path, f"s{number}", **fields)
        assembly.registry(settings).promote(number)
        assert_found(models.champion_fits(settings), verdict, told)
    whole = built.read_bytes()
    built.write_bytes(b"spoilt")
    found = run_check("alignment", lambda: models.alignment(settings))
    assert_found(found, Verdict.OK, "draft tokens are one target token")
    assert len(built.read_bytes()) == len(whole)


def test_a_log_that_is_not_there_no_log_or_does_not_answer(
    settings: config.Settings, tiny_models, tmp_path: Path
) -> None:
    assert_found(log.connection(settings), Verdict.WARNING, "nothing at", "OMNIDRAFT_LOG")
    assert not (tmp_path / "log.db").exists()
    (tmp_path / "log.db").write_bytes(b"this is no database" * 100)
    found = run_check("log", lambda: log.connection(settings))
    assert_found(found, Verdict.PROBLEM, "log.db", "OMNIDRAFT_LOG")
    dead = of(tiny_models, tmp_path, log={"url": "kafka://127.0.0.1:9", "request_timeout_s": 1.0})
    found = run_check("log", lambda: log.connection(dead))
    assert_found(found, Verdict.PROBLEM, "127.0.0.1:9", "start the log")


def test_topics_that_are_missing_or_have_other_partitions(
    settings: config.Settings, tiny_models, tmp_path: Path
) -> None:
    write(settings)
    assert_found(log.topic(settings, settings.log.traces_topic), Verdict.OK, "1 partitions")
    assert_found(log.topic(settings, settings.log.control_topic), Verdict.WARNING, "not there yet")
    three = of(tiny_models, tmp_path, log={"url": settings.log.url, "partitions": 3})
    assert_found(log.topic(three, three.log.traces_topic), Verdict.WARNING, "1 partitions, the settings say 3")


def test_a_log_that_no_longer_holds_what_the_learner_reads_next(settings: config.Settings, tmp_path: Path) -> None:
    write(settings, 3)
    publish(settings, tmp_path, "s1", offsets={0: 2})
    assert_found(log.position(settings), Verdict.OK, "1 records behind")
    publish(settings, tmp_path, "s2", offsets={0: 4})
    assert_found(log.position(settings), Verdict.PROBLEM, "version 2", "offset 4 of partition 0, which ends at 3")


def test_a_record_from_the_future(settings: config.Settings) -> None:
    assert_found(log.clocks(settings), Verdict.OK, "no record")
    write(settings)
    assert_found(log.clocks(settings), Verdict.OK, "record 0:2", "old")
    assert_found(log.clocks(settings, now_ms=1_000_000), Verdict.PROBLEM, "record 0:2", "in the future", "NTP")


def test_a_registry_that_is_not_there_or_does_not_answer(
    settings: config.Settings, tiny_models, tmp_path: Path
) -> None:
    assert_found(registry.connection(settings), Verdict.WARNING, "nothing at", "MLFLOW_TRACKING_URI")
    assert not (tmp_path / "registry").exists()
    dead = of(tiny_models, tmp_path, registry={"url": "http://127.0.0.1:9"})
    found = run_check("registry", lambda: registry.connection(dead))
    assert_found(found, Verdict.PROBLEM, "127.0.0.1:9", "start the registry")


def test_aliases_that_make_no_sense(settings: config.Settings, tmp_path: Path) -> None:
    assert_found(registry.aliases(settings), Verdict.OK, "no version")
    publish(settings, tmp_path, "s1")
    assert_found(registry.aliases(settings), Verdict.WARNING, "no champion", "controller")
    publish(settings, tmp_path, "s2")
    for version in (1, 2):
        assembly.registry(settings).promote(version)
    assert_found(registry.aliases(settings), Verdict.OK, "champion is 2, previous is 1")
    (path,) = (tmp_path / "registry").glob("*/aliases.json")
    path.write_text('{"champion": 9, "previous": 1}')
    assert_found(registry.aliases(settings), Verdict.PROBLEM, "none of 2 versions", "previous is 1", "promote VERSION")


def test_a_champion_whose_file_changed(settings: config.Settings, tmp_path: Path) -> None:
    publish(settings, tmp_path, "s1")
    assembly.registry(settings).promote(1)
    assert_found(registry.files(settings), Verdict.OK, "1 versions")
    (weights,) = (tmp_path / "registry").glob("**/serving/drafter.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.unlink()
    weights.write_bytes(content)
    assert_found(registry.files(settings), Verdict.PROBLEM, "version 1 (champion", "drafter.safetensors", "intact")


def test_weights_that_a_repository_has_twice_are_counted_once(tmp_path: Path) -> None:
    """Mistral's have the same again in its authors' form."""
    for name in ("model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (tmp_path / name).write_bytes(b"x" * 10)
    assert models.weights_bytes(tmp_path) == 10


@pytest.mark.parametrize("content", [None, "[decode\n"])
def test_a_settings_file_of_no_use_is_no_wrong_setting(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "settings.toml"
    if content is not None:
        path.write_text(content)
    found = run_check("settings", lambda: config.load(path, {}))
    assert (found.verdict, found.advice) == (Verdict.PROBLEM, "correct --config, or the file")
