"""A tenant's text is found everywhere that a fleet keeps it, then the tenant is forgotten, and it is found nowhere: on
one machine, with and without encryption, and on a real broker."""

import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.bus.encryption import new_key
from omnidraft.distill.examples.training_example import ExampleBuilder
from omnidraft.ports import Outgoing
from omnidraft.snapshots.bundle import key_id_of
from omnidraft.testing.tiny_models import TEXT
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.cli_runs import run_cli
from tests.integration.settings_runs import emit, environ
from tests.integration.token_search import TokenSearch
from tests.tiny_fleet import LEARNER, fleet_settings, running_fleet
from tests.tiny_pair import Pair

PLANTED, OTHER = TEXT[2], TEXT[0]
LEAVER, STAYER = "team-leaver", "team-stayer"
PATIENCE_S = 90.0


@dataclass
class Home:
    """Where a fleet runs, and how to look into all that it keeps."""

    settings: config.Settings
    folder: Path
    pair: Pair
    tokenizers: assembly.Vocabularies

    def search(self, text: str) -> TokenSearch:
        ngrams = self._ngrams(text) - self._ngrams(OTHER if text == PLANTED else PLANTED)
        return TokenSearch(self.settings, self.tokenizers, self.folder, text, tuple(ngrams))

    def _ngrams(self, text: str) -> set[tuple[tuple[int, ...], int]]:
        pair = self.pair
        builder = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=256)
        return {(tuple(each.draft_ids), each.target_id) for each in builder.build(self.record("n", text, "")).ngrams}

    def record(self, name: str, text: str, tenant: str, **changes: Any) -> TraceRecord:
        models = self.settings.models
        facts = {"tenant": tenant, "time_ms": time.time_ns() // 1_000_000, "target": models.target}
        return self.pair.record(name, text, drafter=models.drafter, **facts | changes)

    def write(self, tenant: str, text: str, num: int = 12) -> None:
        """As a worker does; one record is of another vocabulary pair, and becomes a dead letter, and one is broken."""
        records = [self.record(f"{tenant}-{number}", text, tenant) for number in range(num)]
        emit(self.settings, *records, self.record(f"{tenant}-other", text, tenant, alignment="another"))
        broken = self.record(f"{tenant}-broken", text, tenant)
        with closing(assembly.log_writer(self.settings, self.settings.log.traces_topic)) as writer:
            message = Outgoing(codec.key(broken), codec.encode(broken) + b"?", codec.headers(broken), tenant=tenant)
            writer.append([message])

    def forget(self, *options: str) -> "Callable[..., Any]":
        models = self.settings.models
        pair = {"OMNIDRAFT_MODELS__TARGET": models.target, "OMNIDRAFT_MODELS__DRAFTER": models.drafter}
        given = environ(self.settings) | pair
        return lambda monkeypatch, capsys: run_cli(("tenants", "forget", *options), monkeypatch, capsys, given)


@pytest.fixture(
    params=[
        pytest.param("sqlite", marks=pytest.mark.long),
        "sqlite-encrypted",
        pytest.param("kafka-encrypted", marks=pytest.mark.kafka),
    ]
)
def home(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Home:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    staged = tmp_path / "tmp"
    staged.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(staged))
    log: dict[str, Any] = {"url": f"sqlite:///{tmp_path}/log.db"}
    if "kafka" in request.param:
        log["url"] = f"kafka://{request.getfixturevalue('kafka_bootstrap')}"
        log |= {"topic_prefix": f"forgotten-{uuid.uuid4().hex[:8]}", "key_store": f"sqlite:///{tmp_path}/keys.db"}
    if "encrypted" in request.param:
        log["encryption_keys"] = [new_key()]
    learner = LEARNER | {"replay_records": 1, "held_out_every": 3}
    settings = fleet_settings(tiny_models, tmp_path, log=log, learner=learner)
    tokenizers = assembly.vocabularies(settings)
    pair = Pair(tokenizers.drafter_folder, tokenizers.drafter, tokenizers.target, tokenizers.alignment)
    return Home(settings, tmp_path, pair, tokenizers)


def wait_until(is_done: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


def test_a_forgotten_tenants_text_is_found_everywhere_before_and_nowhere_after(
    home: Home, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = home.settings.log
    home.write(LEAVER, PLANTED)
    home.write(STAYER, OTHER)
    planted, other = home.search(PLANTED), home.search(OTHER)
    assert planted.ngrams
    assert other.ngrams
    with running_fleet(home.settings, home.folder) as fleet:
        wait_until(fleet.registry.versions, "it never published")
        wait_until(lambda: sum(fleet.registry.resolve("latest").manifest.offsets.values()) > 16, "it never learned")
        wait_until(lambda: "tmp/" in " ".join(planted.places()), "it was never staged")
        before = planted.places()
        kinds = {"intake.safetensors", "learner.safetensors", "ngrams.safetensors"}
        assert {log.traces_topic, log.dead_letters_topic} <= before
        assert {place.rpartition("/")[2] for place in before if place.startswith("registry/")} >= kinds
        assert any(place.startswith("tmp/") and place.endswith("ngrams.safetensors") for place in before)
        is_encrypted = bool(log.encryption_keys)
        memories = {place for place in before if "/memory/" in place}
        assert {place.partition("/")[0] for place in memories} == {"distiller", "registry", "tmp"}
        assert all((key_id_of(place) is not None) is is_encrypted for place in memories)
        assert ("log.db" in before) is (log.url.startswith("sqlite") and not is_encrypted)

        done = home.forget(LEAVER, "--yes", "--purge-snapshots")(monkeypatch, capsys)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "forget --exact" in done.stdout
        wait_until(lambda: fleet.registry.resolve("champion").manifest.forgets, "the clean one was never promoted")
        wait_until(lambda: fleet.worker.served[0].engine.slot.current.manifest.forgets, "it was never taken up")
        again = home.forget(LEAVER, "--yes", "--purge-snapshots")(monkeypatch, capsys)
        assert again.returncode == 0, again.stdout + again.stderr
        assert again.stdout.count("0 readable") == 1
        wait_until(lambda: not planted.places(), f"still there: {planted.places()}")
    assert planted.places() == set()
    assert {log.traces_topic, log.dead_letters_topic} <= other.places()
    kept = {place.rpartition("/")[2] for place in other.places() if place.startswith("registry/")}
    assert kept >= {"intake.safetensors", "ngrams.safetensors"}
    assert any("/memory/" in place for place in other.places())
