"""What a certificate of forgetting says, whose signature it has, and when there is none."""

import base64
import json
from pathlib import Path

import pytest

from omnidraft.errors import RequestError
from omnidraft.fleet.forgetting_certificate import derivation, write_certificate
from omnidraft.ports import Forget
from omnidraft.registry.directory_registry import DirectoryRegistry
from omnidraft.snapshots.keys import PrivateKey, TrustedKeys, new_private_key
from omnidraft.snapshots.manifest import digest
from omnidraft.snapshots.signing import UNSIGNED, SnapshotSigning
from tests.cli_runs import run_cli
from tests.snapshot_folders import make_bundle

ORDER = Forget(id="order", until_ms=1, first_offsets={0: 5})


def registry_of(folder: Path, *manifests: dict[str, object]) -> DirectoryRegistry:
    """Versions from these fields, each a child of the one that `parent` names."""
    made = DirectoryRegistry(folder / "registry", "org/small", "big", keep_resume=9)
    for number, fields in enumerate(manifests):
        parent = fields.pop("parent", number)
        parent_id = f"s{parent}" if parent else None
        made.publish(make_bundle(folder / "made", f"s{number + 1}", parent_id=parent_id, **fields), number or None)
    return made


def exact(folder: Path) -> DirectoryRegistry:
    """Version 2 is from before the tenant, 3 learned from it, 4 and 5 are catching up, 6 is the first that is done."""
    done = {"forgets": ("order",)}
    return registry_of(
        folder,
        {},
        {"offsets": {0: 4}, "num_records": 3},
        {"offsets": {0: 9}, "num_records": 8},
        {"offsets": {0: 4}, "num_records": 3, "parent": 2, "catching_up_to": {0: 9}, **done},
        {"offsets": {0: 7}, "num_records": 5, "catching_up_to": {0: 9}, **done},
        {"offsets": {0: 9}, "num_records": 6, **done},
        {"offsets": {0: 11}, "num_records": 8, **done},
    )


def payload(path: Path) -> dict[str, object]:
    return json.loads(base64.b64decode(json.loads(path.read_text())["payload"]))


def test_it_says_where_learning_went_back_to_what_it_learned_again_and_what_came_out(tmp_path: Path) -> None:
    versions = exact(tmp_path).versions()
    derived = derivation(versions, ORDER)
    assert derived is not None
    said = payload(write_certificate(tmp_path, "team", ORDER, derived, UNSIGNED))
    assert (said["start"]["version"], said["result"]["version"], said["num_records"]) == (2, 6, 3)
    assert said["result"]["sha256"] == versions[5].manifest.sha256
    assert said["result"]["digest"] == digest(versions[5].manifest)
    assert "team" not in json.dumps(said)


def test_there_is_none_before_everything_is_learned_again(tmp_path: Path) -> None:
    versions = exact(tmp_path).versions()
    assert [derivation(versions[:number], ORDER) for number in range(6)] == [None] * 6


def test_there_is_none_where_the_weights_kept_what_they_learned(tmp_path: Path) -> None:
    versions = registry_of(tmp_path, {}, {"offsets": {0: 9}}, {"offsets": {0: 9}, "forgets": ("order",)}).versions()
    with pytest.raises(RequestError, match="but for the weights"):
        derivation(versions, ORDER)


def test_it_is_signed_with_the_key_that_signs_snapshots_and_a_command_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = PrivateKey(new_private_key())
    signing = SnapshotSigning(key, TrustedKeys([key.public_text("operator")]))
    derived = derivation(exact(tmp_path).versions(), ORDER)
    assert derived is not None
    path = write_certificate(tmp_path, "team", ORDER, derived, signing)
    public, stranger = (each.public_text("operator") for each in (key, PrivateKey(new_private_key())))

    def verify(*options: str) -> tuple[int, str]:
        done = run_cli(("verify", path, *options), monkeypatch, capsys)
        return done.returncode, done.stdout

    code, said = verify("--key", public, "--tenant", "team")
    lines = said.splitlines()
    assert (code, lines[0], lines[-1]) == (0, f"{path}: certified", "1 certified")
    versions = {each.version: each.manifest for each in exact(tmp_path / "again").versions()}
    for words in ("had forgotten team", *(f"snapshot {n} (s{n}, digest {digest(versions[n])})" for n in (2, 6))):
        assert words in said
    for options in (("--key", stranger), ("--key", public.replace("operator", "worker")), ("--tenant", "other")):
        assert verify(*options)[0] == 1
    assert verify()[0] == 2
    envelope = json.loads(path.read_text())
    signed = base64.b64decode(envelope["payload"])
    changed = signed.replace(b'"num_records":3', b'"num_records":4')
    assert changed != signed
    for last, name, value in (
        ("1 certificate REFUSED", "payload", base64.b64encode(changed).decode()),
        ("0 of 1: the same bits; 1 REFUSED", "payloadType", "other"),
        ("1 certificate REFUSED", "signatures", []),
    ):
        path.write_text(json.dumps(envelope | {name: value}))
        code, said = verify("--key", public)
        assert (code, said.splitlines()[-1]) == (1, last)
        assert ("it is unsigned" in said) == (name == "signatures")
    code, said = verify()
    assert (code, "not checked: it is unsigned" in said) == (2, True)
