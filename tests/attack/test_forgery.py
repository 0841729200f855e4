"""Who can write to the registry and to the control log, but holds no key that may sign there, is followed by nobody."""

import itertools
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnidraft import assembly
from omnidraft.assembly.registries import snapshot_reader
from omnidraft.decode.snapshot import loading
from omnidraft.errors import ConfigError, SignatureRefused, SnapshotCorrupt
from omnidraft.files import sha256_of
from omnidraft.fleet import control_log, control_signing
from omnidraft.ports import Champion, WorkerNews
from omnidraft.registry import staging
from omnidraft.snapshots import bundle, keys, signing
from omnidraft.snapshots.manifest import Manifest, signed_payload
from omnidraft.telemetry.metrics import CountingMetrics
from tests import signed_fleet
from tests.attack import forgeries
from tests.attack.forgeries import CHALLENGER, CHAMPION, FORGERIES, OLD, Attacker
from tests.signed_fleet import Keys, Worker, promote, settings_of
from tests.snapshot_folders import version_folder

NUM_FORGERIES = 200
NUM_TAMPERED, NUM_INVENTED = 400, 500
STATES = ("running", "new")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """The keys and files of a fleet whose worker has taken up the champion."""
    folder = tmp_path_factory.mktemp("fleet")
    made = forgeries.genuine_fleet(folder)
    assert Worker(settings_of(made, folder), folder / "staging").step() == CHAMPION
    return made, folder


class Trial:
    """Forgeries against copies of the fleet's files."""

    def __init__(self, fleet: tuple[Keys, Path], scratch: Path) -> None:
        (self.keys, self.genuine), self.scratch, self.numbers = fleet, scratch, itertools.count()
        self.weights = sha256_of(version_folder(self.genuine / "registry", CHAMPION) / "snapshot" / bundle.DRAFTER)

    def is_followed(self, forgery: forgeries.Forgery, state: str, seed: int) -> bool:
        """Return whether a worker serves, or has loaded, anything but the champion's own weights."""
        folder = self.scratch / str(next(self.numbers))
        shutil.copytree(self.genuine, folder, ignore=shutil.ignore_patterns("staging", "bundles"))
        worker = Worker(settings_of(self.keys, folder), folder / "staging")
        if state == "running":
            assert worker.step() == CHAMPION
        forgery(Attacker(self.keys, folder, random.Random(f"{forgery.__name__} {state} {seed}")))
        versions = {worker.step(), worker.step()} - {CHAMPION, None if state != "running" else CHAMPION}
        loaded = {each for each in worker.loads if each != (CHAMPION, self.weights)}
        shutil.rmtree(folder)
        return bool(versions or loaded or worker.slot.canary)

    def attempts(self) -> Iterator[tuple[forgeries.Forgery, str, int]]:
        """Every kind of forgery in every state that it concerns, with one seed after the other."""
        for seed in itertools.count():
            for forgery, state in itertools.product(FORGERIES, STATES):
                if _concerns(forgery, state):
                    yield forgery, state, seed


def _concerns(forgery: forgeries.Forgery, state: str) -> bool:
    if forgery is forgeries.keep_an_announcement_for_long:
        return state == "new"
    return forgery not in forgeries.BACK_IN_TIME or state == "running"


@pytest.fixture
def trial(fleet, tmp_path):
    return Trial(fleet, tmp_path)


def test_no_forgery_is_followed(trial):
    attempts = list(itertools.islice(trial.attempts(), NUM_FORGERIES))
    followed = [
        (forgery.__name__, state, seed) for forgery, state, seed in attempts if trial.is_followed(forgery, state, seed)
    ]
    assert (len(set(attempts)), followed) == (NUM_FORGERIES, [])


def test_without_a_forgery_every_worker_serves_the_champion(trial):
    """What the other tests rest on: it is the forgery that is refused."""
    for state in STATES:
        folder = trial.scratch / state
        shutil.copytree(trial.genuine, folder, ignore=shutil.ignore_patterns("staging"))
        worker = Worker(settings_of(trial.keys, folder), folder / "staging")
        assert (worker.step(), worker.loads) == (CHAMPION, [(CHAMPION, trial.weights)])


def test_after_a_flood_of_forgeries_the_operators_rollback_is_followed(fleet, tmp_path):
    made, genuine = fleet
    folder = tmp_path / "fleet"
    shutil.copytree(genuine, folder)
    worker = Worker(settings_of(made, folder), folder / "staging")
    assert worker.step() == CHAMPION
    for seed, forgery in itertools.product(range(4), forgeries.ON_THE_LOG):
        forgery(Attacker(made, folder, random.Random(seed)))
    assert worker.step() == CHAMPION
    assert worker.metrics.value("omnidraft_control_messages_refused_total", target="big") > 0
    promote(settings_of(made, folder, "operator"), OLD)
    assert worker.step() == OLD
    assert Worker(settings_of(made, folder), folder / "other").step() == OLD


def test_a_stolen_login_of_a_worker_changes_what_is_shown_of_workers_and_nothing_else(fleet, tmp_path):
    """Workers may write to the control topic, where they say that they run: whoever can may invent as many as he
    likes. Nobody keeps them but who shows them."""
    made, genuine = fleet
    folder = tmp_path / "fleet"
    shutil.copytree(genuine, folder)
    settings = settings_of(made, folder)
    thief = assembly.control_log(settings, CountingMetrics())
    with pytest.raises(ConfigError, match="this process has to sign"):
        thief.put(("champion",), Champion(version=OLD))
    for number in range(NUM_INVENTED):
        thief.put(("worker", f"w{number}"), WorkerNews(address=None, release="1", serves={"big": OLD}))
    worker = Worker(settings, folder / "staging")
    assert worker.step() == CHAMPION
    assert worker.slot.rules.state.of(WorkerNews) == {}
    shown = assembly.overview(settings)
    assert len(shown.workers) == NUM_INVENTED
    assert f"worker w7: serves snapshot {OLD} of big, the champion is {CHAMPION}" in shown.problems


class Tampering:
    """Snapshots of a registry, each changed somewhere, and a reader with public keys."""

    def __init__(self, fleet: tuple[Keys, Path], folder: Path) -> None:
        self.keys, genuine = fleet
        shutil.copytree(genuine / "registry", folder / "registry")
        self.folder, self.reader = folder, snapshot_reader(settings_of(self.keys, folder))
        self.attacker = Attacker(self.keys, folder, random.Random(19))
        self.snapshots = {number: _contents(self.attacker.snapshot(number)) for number in (OLD, CHAMPION, CHALLENGER)}
        self.numbers = itertools.count()

    def refuses(self) -> bool:
        """Change one snapshot, and return whether fetching it is refused, in an empty folder and in one that has it."""
        version = self.attacker.dice.choice((OLD, CHAMPION, CHALLENGER))
        known = self.folder / "staged"
        if not known.exists():
            for number in self.snapshots:
                self.reader.fetch(number, known, ("serving", "resume"))
        folder = self.attacker.snapshot(version)
        while not self._tamper(version, folder):
            _restore(folder, self.snapshots[version])
        into = self.folder / f"fetched-{next(self.numbers)}"
        try:
            self.reader.fetch(version, into, ("serving", "resume"))
        except SnapshotCorrupt:
            return True
        finally:
            _restore(folder, self.snapshots[version])
            shutil.rmtree(into, ignore_errors=True)
        return False

    def _tamper(self, version: int, folder: Path) -> bool:
        """Return whether it changed what is signed, or the signature; a blank more in the JSON does not."""
        attacker, dice = self.attacker, self.attacker.dice
        way = dice.choice(("file", "fitting file", "manifest", "other file", "field", "signature", "signer"))
        told = attacker.manifest(version)
        name = dice.choice(sorted(told.sha256))
        if way in ("file", "fitting file"):
            attacker.replace(folder / name, attacker.flipped((folder / name).read_bytes()))
        if way == "other file":
            source = dice.choice([number for number in self.snapshots if number != version])
            attacker.replace(folder / name, self.snapshots[source][name])
        if (way in ("fitting file", "other file") and dice.random() < 0.5) or way == "fitting file":
            told = told.model_copy(update={"sha256": {**told.sha256, name: sha256_of(folder / name)}})
            attacker.write_manifest(told, version)
        elif way == "manifest":
            path = folder / bundle.MANIFEST
            attacker.replace(path, attacker.flipped(path.read_bytes()))
        elif way in ("field", "signature", "signer"):
            attacker.write_manifest(self._forged(told, way), version)
        return self._is_changed(version, folder)

    def _forged(self, told: Manifest, way: str) -> Manifest:
        attacker, dice = self.attacker, self.attacker.dice
        if way == "field":
            name = dice.choice(("num_records", "created_ms", "parent_id", "agreement_after", "alignment"))
            value = {"parent_id": "p", "alignment": "b", "agreement_after": dice.random()}.get(
                name, dice.randrange(9, 99)
            )
            return told.model_copy(update={name: value})
        if way == "signature":
            (genuine,) = told.signatures.items()
            changed = attacker.flipped(bytes.fromhex(genuine[1])).hex()
            return told.model_copy(update={"signatures": dice.choice(({}, {genuine[0]: changed}, {"x": genuine[1]}))})
        owner = dice.choice(("stranger", "controller"))
        changed = told.model_copy(update={"num_records": dice.randrange(999)})
        own = attacker.signature(owner, signed_payload(changed), signing.PAYLOAD_TYPE)
        return changed.model_copy(update={"signatures": own})

    def _is_changed(self, version: int, folder: Path) -> bool:
        genuine = self.snapshots[version]
        if any((folder / name).read_bytes() != content for name, content in genuine.items() if name != bundle.MANIFEST):
            return True
        try:
            told = bundle.read_manifest(folder)
        except SnapshotCorrupt:
            return True
        first = Manifest.model_validate_json(genuine[bundle.MANIFEST])
        return _significant(told) != _significant(first)


def _significant(manifest: Manifest) -> tuple[bytes, dict[str, str]]:
    return signed_payload(manifest), {name: signature.lower() for name, signature in manifest.signatures.items()}


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _restore(folder: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (folder / name).unlink()
        (folder / name).write_bytes(content)


def test_tampered_snapshots_are_refused(fleet, tmp_path):
    tampering = Tampering(fleet, tmp_path)
    assert sum(tampering.refuses() for _ in range(NUM_TAMPERED)) == NUM_TAMPERED
    for version in tampering.snapshots:
        tampering.reader.fetch(version, tmp_path / "genuine", ("serving", "resume"))


def _ignore(*args, **kwargs):
    return None


def _any_role(self, payload, payload_type, signatures, roles):
    VERIFY(self, payload, payload_type, signatures, ("distiller", "controller", "operator"))


def _any_type(self, payload, payload_type, signatures, roles):
    try:
        VERIFY(self, payload, payload_type, signatures, roles)
    except SignatureRefused:
        VERIFY(self, payload, signing.PAYLOAD_TYPE, signatures, roles)


def _any_key(self, payload, payload_type, signatures, roles):
    if not signatures:
        raise SignatureRefused("none")


def _presence_only(folder, parts):
    if not all((folder / part).is_dir() for part in parts):
        raise SnapshotCorrupt("nothing there")


VERIFY = keys.TrustedKeys.verify
BUGS = {
    "verifies nothing": [(keys.TrustedKeys, "verify", _ignore)],
    "takes any key": [(keys.TrustedKeys, "verify", _any_key)],
    "ignores roles": [(keys.TrustedKeys, "verify", _any_role)],
    "ignores what was signed": [(keys.TrustedKeys, "verify", _any_type)],
    "forgets sequences": [(control_log.ControlLog, "_require_newer", _ignore)],
    "ignores age": [(control_signing, "_require_fresh", _ignore)],
    "ignores which snapshot was put": [(loading, "_require_expected", _ignore)],
    "trusts the alias": [(signed_fleet, "follows_registry", lambda settings: True)],
    "verifies before it fetches only": [(staging.bundle, "verify", _presence_only)],
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_lets_a_forgery_through(bug, trial, monkeypatch):
    """The suite can fail: each of these mistakes in our code is found by it."""
    for owner, name, mistake in BUGS[bug]:
        monkeypatch.setattr(owner, name, mistake)
    attempts = itertools.islice(trial.attempts(), NUM_FORGERIES)
    assert any(trial.is_followed(*attempt) for attempt in attempts)


TAMPERING_BUGS = {
    "no signature is asked for": (signing.SnapshotSigning, "require", _ignore),
    "any signature will do": (keys.TrustedKeys, "verify", _any_key),
    "any role will do": (keys.TrustedKeys, "verify", _any_role),
    "what was fetched is not verified": (staging.bundle, "verify", _presence_only),
}


@pytest.mark.parametrize("bug", TAMPERING_BUGS)
def test_a_planted_bug_lets_a_tampered_snapshot_through(bug, fleet, tmp_path, monkeypatch):
    tampering = Tampering(fleet, tmp_path)
    monkeypatch.setattr(*TAMPERING_BUGS[bug])
    assert not all(tampering.refuses() for _ in range(NUM_TAMPERED))
