"""Forgeries by somebody who can write to the registry and to the control log, and holds no key that would do."""

import base64
import json
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omnidraft import assembly, config
from omnidraft.files import sha256_of
from omnidraft.fleet.authentication import HEADER, PAYLOAD_TYPE, AnnouncementSigner, SignedLog
from omnidraft.fleet.control_log import KEY, PARTITION, announcement_json
from omnidraft.ports import CHAMPION_STATEMENT, Message, Outgoing
from omnidraft.snapshots import bundle, signing
from omnidraft.snapshots.manifest import Manifest, digest, signed_payload
from tests.signed_fleet import DRAFTER, TARGET, Keys, announce, promote, settings_of
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
    announce(controller, assembly.registry(controller), "canary", CHALLENGER, share=0.5)
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
        """The genuine announcements: the old champion, the canary, the champion."""
        reader, found = assembly.log_reader(self.settings, self.settings.log.control_topic), []
        while polled := reader.poll(100, 0.0).messages:
            found += polled
        reader.close()
        return found

    def append(self, value: bytes, signatures: bytes | dict[str, str] | None) -> None:
        header = json.dumps(signatures).encode() if isinstance(signatures, dict) else signatures
        writer = assembly.log_writer(self.settings, self.settings.log.control_topic)
        writer.append([Outgoing(KEY, value, {} if header is None else {HEADER: header}, partition=PARTITION)])
        writer.close()

    def remove_log(self) -> None:
        for path in self.folder.glob("log.db*"):
            path.unlink()

    def claim(self, version: int, kind: str = "champion") -> bytes:
        """A payload that says what nobody did: newer than everything, and bound to that snapshot."""
        said = {"target": TARGET, "drafter": DRAFTER, "digest": digest(self.manifest(version))}
        wire = json.loads(announcement_json(kind, version, **said, **({"share": 1.0} if kind == "canary" else {})))
        now_ms = int(time.time() * 1000) + self.dice.randrange(10_000)
        return json.dumps(wire | {"sequence": now_ms, "issued_ms": now_ms}).encode()

    def signed_long_ago(self, version: int) -> tuple[bytes, dict[str, str]]:
        """A genuine announcement of the controller, from before the oldest that holds."""
        wire = announcement_json(
            "champion", version, target=TARGET, drafter=DRAFTER, digest=digest(self.manifest(version))
        )
        reader = assembly.log_reader(self.settings, self.settings.log.control_topic)
        signer = AnnouncementSigner(
            self.keys["controller"],
            self.keys.trusted,
            SignedLog(lambda: reader, self.keys.trusted),
            clock=lambda: time.time() - LONG_AGO_S,
        )
        signed = signer.sign(wire)
        reader.close()
        return signed

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

    def notes(self, version: int) -> dict[str, str]:
        path = version_folder(self.folder / "registry", version) / "notes.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def state(self, version: int, payload: bytes, signatures: dict[str, str]) -> None:
        """Move the alias to a version, with this statement beside it."""
        listed = [
            {"keyid": name, "sig": base64.b64encode(bytes.fromhex(signature)).decode()}
            for name, signature in signatures.items()
        ]
        envelope = {"payload": base64.b64encode(payload).decode(), "payloadType": PAYLOAD_TYPE, "signatures": listed}
        self.put_statement(version, json.dumps(envelope))

    def put_statement(self, version: int, statement: str) -> None:
        path = version_folder(self.folder / "registry", version) / "notes.json"
        path.write_text(json.dumps(self.notes(version) | {CHAMPION_STATEMENT: statement}))
        self.move_alias(version)


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


def copy_a_statement(attacker: Attacker) -> None:
    attacker.put_statement(CHALLENGER, attacker.notes(attacker.dice.choice((OLD, CHAMPION)))[CHAMPION_STATEMENT])


def flip_a_statement(attacker: Attacker) -> None:
    said = base64.b64decode(json.loads(attacker.notes(CHAMPION)[CHAMPION_STATEMENT])["payload"])
    edited = attacker.claim(CHALLENGER) if attacker.dice.random() < 0.3 else attacker.flipped(said)
    attacker.state(other(attacker), edited, attacker.signature("distiller", said))


def state_as_somebody_else(attacker: Attacker) -> None:
    version = other(attacker)
    payload, owner = attacker.claim(version), attacker.dice.choice(("stranger", "distiller", "id", "type", "none"))
    attacker.state(version, payload, _signatures(attacker, owner, payload))


def state_rubbish(attacker: Attacker) -> None:
    rubbish = ("[" * 50_000, "{}", "null", "void", '{"payload": 1}', '{"payload": "", "signatures": 3}')
    attacker.put_statement(other(attacker), attacker.dice.choice(rubbish) + " " * attacker.dice.randrange(100))


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
        attacker.state(version, payload, signatures)


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
)
ON_STATEMENTS: tuple[Forgery, ...] = (
    only_move_the_alias,
    copy_a_statement,
    flip_a_statement,
    state_as_somebody_else,
    state_rubbish,
)
ON_THE_LOG: tuple[Forgery, ...] = (
    announce_as_somebody_else,
    duplicate_signatures,
    flip_an_announcement,
    edit_an_announcement,
    replay_an_announcement,
)
BACK_IN_TIME: tuple[Forgery, ...] = (bring_back_an_old_log, empty_the_log)
"""Against who remembers: a worker that starts with nothing knows of no later champion."""
FORGERIES = ON_FILES + ON_STATEMENTS + ON_THE_LOG + BACK_IN_TIME + (keep_an_announcement_for_long,)
