"""Forgeries by somebody who can write to the registry and to the control log, and holds no key that would do."""

import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from omnidraft import assembly, config
from omnidraft.files import sha256_of
from omnidraft.fleet.control_log import PARTITION, ControlLog
from omnidraft.fleet.control_signing import HEADER, PAYLOAD_TYPE, ControlSigning
from omnidraft.ports import Canary, Champion, Message, Outgoing
from omnidraft.snapshots import bundle, signing
from omnidraft.snapshots.manifest import Manifest, digest, signed_payload
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.memory_log import MemoryLog, MemoryReader, MemoryWriter
from tests.signed_fleet import DRAFTER, TARGET, Keys, promote, put, settings_of
from tests.snapshot_folders import make_bundle, version_folder

CHAMPION, OLD, CHALLENGER = 2, 1, 3
LONG_AGO_S = 200 * 3600


def genuine_fleet(folder: Path) -> Keys:
    """Version 1 was champion, version 3 a canary, version 2 is the champion; all of it signed."""
    keys = Keys()
    distiller, operator, controller = (
        settings_of(keys, folder, role) for role in ("distiller", "operator", "controller")
    )
    for number in (1, 2, 3):
        assembly.registry(distiller).publish(make_bundle(folder / "bundles", f"s{number}"), number - 1 or None)
    promote(operator, OLD)
    manifest = assembly.registry(controller).resolve(str(CHALLENGER)).manifest
    put(controller, ("canary",), Canary(version=CHALLENGER, share=0.5, digest=digest(manifest)))
    promote(controller, CHAMPION)
    return keys


@dataclass
class Attacker:
    """What one forgery works on: a copy of the fleet's files, and its dice."""

    keys: Keys
    folder: Path
    dice: random.Random

    @property
    def settings(self) -> config.Settings:
        """Of a process without keys, which writes to the log what it likes."""
        return config.load(None, {}, log={"url": f"sqlite:///{self.folder}/log.db"})

    def messages(self) -> list[Message]:
        """The genuine messages: the old champion, the canary, the champion."""
        reader, found = assembly.log_reader(self.settings, self.settings.log.control_topic), []
        while polled := reader.poll(100, 0.0).messages:
            found += polled
        reader.close()
        return found

    def append(self, value: bytes, signatures: bytes | dict[str, str] | None) -> None:
        header = json.dumps(signatures).encode() if isinstance(signatures, dict) else signatures
        writer = assembly.log_writer(self.settings, self.settings.log.control_topic)
        headers = {} if header is None else {HEADER: header}
        name = _name("canary" if b'"canary/' in value else "champion")
        writer.append([Outgoing(name.encode(), value, headers, partition=PARTITION)])
        writer.close()

    def remove_log(self) -> None:
        for path in self.folder.glob("log.db*"):
            path.unlink()

    def claim(self, version: int, kind: str = "champion") -> bytes:
        """A payload that says what nobody did: newer than everything, and bound to that snapshot."""
        now_ms = int(time.time() * 1000) + self.dice.randrange(10_000)
        share = {"share": 1.0} if kind == "canary" else {}
        value = {"version": version, "digest": digest(self.manifest(version)), **share}
        wire = {"key": _name(kind), "sequence": now_ms, "at_ms": now_ms, "value": value}
        return json.dumps(wire).encode()

    def signed_long_ago(self, version: int) -> tuple[bytes, dict[str, str]]:
        """A genuine message of the controller, from before the oldest that holds."""
        log, signing = MemoryLog(), ControlSigning(self.keys["controller"], self.keys.trusted)
        control = ControlLog(
            lambda: MemoryReader(log, "control"),
            lambda: MemoryWriter(log, "control"),
            CountingMetrics(),
            target=TARGET,
            drafter=DRAFTER,
            signing=signing,
            clock=lambda: time.time() - LONG_AGO_S,
        )
        control.put(("champion",), Champion(version=version, digest=digest(self.manifest(version))))
        (message,) = log.topic("control")[0]
        return message.value, json.loads(message.headers[HEADER])

    def signature(self, owner: str, payload: bytes, payload_type: str = PAYLOAD_TYPE) -> dict[str, str]:
        key = self.keys[owner]
        return {key.key_id: key.sign(payload, payload_type)}

    def under_a_trusted_id(self, payload: bytes, payload_type: str = PAYLOAD_TYPE, owner: str = "controller"):
        return {self.keys[owner].key_id: self.keys["stranger"].sign(payload, payload_type)}

    def snapshot(self, version: int) -> Path:
        return version_folder(self.folder / "registry", version) / "snapshot"

    def manifest(self, version: int) -> Manifest:
        return bundle.read_manifest(self.snapshot(version))

    def write_manifest(self, manifest: Manifest, version: int = CHAMPION) -> None:
        self.replace(self.snapshot(version) / bundle.MANIFEST, manifest.model_dump_json().encode())

    def change_weights(self, *, with_checksum: bool) -> Manifest:
        """Other weights under the champion's version. Returns a manifest that fits, which is not signed."""
        path = self.snapshot(CHAMPION) / bundle.DRAFTER
        self.replace(path, self.flipped(path.read_bytes()))
        told = self.manifest(CHAMPION)
        fitting = told.model_copy(update={"sha256": {**told.sha256, bundle.DRAFTER: sha256_of(path)}})
        if with_checksum:
            self.write_manifest(fitting)
        return fitting.model_copy(update={"signatures": {}})

    def flipped(self, content: bytes) -> bytes:
        position, bit = self.dice.randrange(len(content)), self.dice.randrange(8)
        return content[:position] + bytes([content[position] ^ (1 << bit)]) + content[position + 1 :]

    def replace(self, path: Path, content: bytes) -> None:
        path.unlink()  # it may be a link
        path.write_bytes(content)

    def move_alias(self, version: int) -> None:
        (path,) = (self.folder / "registry").glob("*/aliases.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"champion": version}))


def _name(kind: str) -> str:
    """The key of a message of the pair."""
    return f"{kind}/{TARGET}/{quote(DRAFTER, safe='')}"


def other(attacker: Attacker) -> int:
    return attacker.dice.choice((OLD, CHALLENGER))


def flip_a_file(attacker: Attacker) -> None:
    attacker.change_weights(with_checksum=attacker.dice.random() < 0.5)


def flip_the_manifest(attacker: Attacker) -> None:
    path = attacker.snapshot(CHAMPION) / bundle.MANIFEST
    attacker.replace(path, attacker.flipped(path.read_bytes()))


def sign_the_snapshot_as_somebody_else(attacker: Attacker) -> None:
    forged = attacker.change_weights(with_checksum=True)
    payload, owner = signed_payload(forged), attacker.dice.choice(("stranger", "controller", "id", "type", "none"))
    signatures = {
        "id": lambda: attacker.under_a_trusted_id(payload, signing.PAYLOAD_TYPE, "distiller"),
        "type": lambda: attacker.signature("distiller", b"something else", signing.PAYLOAD_TYPE),
        "none": dict,
    }.get(owner, lambda: attacker.signature(owner, payload, signing.PAYLOAD_TYPE))()
    attacker.write_manifest(forged.model_copy(update={"signatures": signatures}))


def swap_the_snapshot(attacker: Attacker) -> None:
    """A genuine one under another version, whole, or only its files or its manifest."""
    source, part = attacker.snapshot(other(attacker)), attacker.dice.choice(("all", "files", "manifest"))
    into = attacker.snapshot(CHAMPION)
    if part != "manifest":
        shutil.rmtree(into / "serving")
        shutil.copytree(source / "serving", into / "serving")
    if part != "files":
        attacker.replace(into / bundle.MANIFEST, (source / bundle.MANIFEST).read_bytes())


def only_move_the_alias(attacker: Attacker) -> None:
    attacker.move_alias(other(attacker))


def announce_as_somebody_else(attacker: Attacker) -> None:
    version, owner = other(attacker), attacker.dice.choice(("stranger", "distiller", "id", "type", "none", "hmac"))
    payload = attacker.claim(version, attacker.dice.choice(("champion", "canary")))
    attacker.append(payload, _signatures(attacker, owner, payload))


def duplicate_signatures(attacker: Attacker) -> None:
    payload, genuine = attacker.claim(other(attacker)), attacker.messages()[-1].headers[HEADER].decode()
    own = json.dumps(attacker.under_a_trusted_id(payload))
    pair = attacker.dice.choice(((genuine, own), (own, genuine), (own, own)))
    attacker.append(payload, (pair[0][:-1] + ", " + pair[1][1:]).encode())


def flip_an_announcement(attacker: Attacker) -> None:
    message = attacker.dice.choice(attacker.messages()[:2])
    attacker.append(attacker.flipped(message.value), message.headers[HEADER])


def edit_an_announcement(attacker: Attacker) -> None:
    message = attacker.dice.choice(attacker.messages())
    edited = json.loads(message.value) | json.loads(attacker.claim(other(attacker)))
    attacker.append(json.dumps(edited).encode(), message.headers[HEADER])


def replay_an_announcement(attacker: Attacker) -> None:
    messages = attacker.messages()[:2]
    for message in attacker.dice.choices(messages, k=attacker.dice.randint(1, 5)):
        attacker.append(message.value, message.headers[HEADER])


def bring_back_an_old_log(attacker: Attacker) -> None:
    """The log as it was before the champion, or out of order; the alias may be moved back with it."""
    messages = attacker.messages()[: attacker.dice.randint(1, 2)]
    attacker.dice.shuffle(messages)
    attacker.remove_log()
    for message in messages * attacker.dice.randint(1, 3):
        attacker.append(message.value, message.headers[HEADER])
    if attacker.dice.random() < 0.5:
        attacker.move_alias(OLD)


def empty_the_log(attacker: Attacker) -> None:
    attacker.remove_log()
    attacker.move_alias(OLD)


def keep_an_announcement_for_long(attacker: Attacker) -> None:
    version = other(attacker)
    payload, signatures = attacker.signed_long_ago(version)
    attacker.remove_log()
    attacker.append(payload, signatures)
    if attacker.dice.random() < 0.5:
        attacker.move_alias(version)


def _signatures(attacker: Attacker, owner: str, payload: bytes) -> dict[str, str]:
    if owner in ("stranger", "distiller"):
        return attacker.signature(owner, payload)
    if owner == "id":
        return attacker.under_a_trusted_id(payload)
    if owner == "type":  # of the right key, but made for something of another kind
        return attacker.signature("controller", payload, signing.PAYLOAD_TYPE)
    return {} if owner == "none" else {"hmac": attacker.dice.randbytes(32).hex()}


Forgery = Callable[[Attacker], None]
ON_FILES: tuple[Forgery, ...] = (
    flip_a_file,
    flip_the_manifest,
    sign_the_snapshot_as_somebody_else,
    swap_the_snapshot,
    only_move_the_alias,
)
ON_THE_LOG: tuple[Forgery, ...] = (
    announce_as_somebody_else,
    duplicate_signatures,
    flip_an_announcement,
    edit_an_announcement,
    replay_an_announcement,
)
BACK_IN_TIME: tuple[Forgery, ...] = (bring_back_an_old_log, empty_the_log)
"""Against who has followed the log: a worker that starts beside a log without its end knows of no later champion."""
FORGERIES = ON_FILES + ON_THE_LOG + BACK_IN_TIME + (keep_an_announcement_for_long,)
