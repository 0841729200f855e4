"""Records in snapshots are encrypted wherever there are keys, and are read again with them alone."""

from pathlib import Path
from typing import Any

import pytest

from omnidraft import config
from omnidraft.assembly.logs import record_cipher
from omnidraft.bus.encryption import new_key
from omnidraft.config import MemorySettings
from omnidraft.distill.publisher import BATCHER, LEARNER
from omnidraft.distill.resume_encryption import decrypt_records
from omnidraft.distill.resume_tensors import records_from_tensors
from omnidraft.errors import ConfigError
from omnidraft.ports import RecordCipher
from omnidraft.snapshots import bundle
from tests.distiller_runs import Setting, learned, names, run_until_idle
from tests.tiny_pair import Pair

URL = "kafka://localhost:1"
KAFKA = {"url": URL, "encryption_keys": [new_key()]}
NO_MEMORY = MemorySettings(tokens_per_tenant=0)
PLACES = {"held_out.": BATCHER, "replay.": LEARNER}


@pytest.fixture
def setting(pair: Pair, tmp_path: Path) -> Setting:
    return Setting(pair, tmp_path, replay_records=1)


def cipher_of(log: dict[str, Any]) -> RecordCipher | None:
    return record_cipher(config.load(None, {}, log=log))


def run(setting: Setting, log: dict[str, Any]) -> list[str]:
    """Learn everything that is new, and return the names of the records."""
    distillation, journal = setting.distiller(held_out_every=3, cipher=cipher_of(log), memory=NO_MEMORY)
    run_until_idle(distillation)
    return learned(journal)


def content(setting: Setting, place: str) -> dict[str, Any]:
    newest = setting.registry.resolve("latest").version
    folder = setting.registry.fetch(newest, setting.folder / "look", ("serving", "resume"))
    return bundle.tensors(folder, PLACES[place])


def is_plain(setting: Setting, place: str) -> bool:
    """Return whether any tensor contains the prompt of a record, as they are encoded."""
    prompts = [setting.record(name).prompt_ids.tobytes() for name in (*setting.names(12), *names(8, 100))]
    tensors = [each.contiguous().numpy().tobytes() for each in content(setting, place).values()]
    return any(prompt in tensor for prompt in prompts for tensor in tensors)


def num_records(setting: Setting, place: str, log: dict[str, Any]) -> int:
    tensors, _ = decrypt_records(content(setting, place), cipher_of(log))
    return len(records_from_tensors(place, tensors))


def test_with_kafka_and_no_key_store_records_open_with_the_master_key_alone(setting: Setting) -> None:
    setting.emit(*setting.names(12))
    run(setting, KAFKA)
    for place in PLACES:
        assert not is_plain(setting, place)
        assert num_records(setting, place, KAFKA)
    setting.emit(*names(8, 100))
    for log in ({"url": URL}, KAFKA | {"encryption_keys": [new_key()]}):
        with pytest.raises(ConfigError, match=r"encrypted records.*set log\.encryption_keys"):
            run(setting, log)
    rotated = KAFKA | {"encryption_keys": [new_key(), *KAFKA["encryption_keys"]]}
    assert set(run(setting, rotated)) <= set(names(8, 100))


def test_a_snapshot_with_plain_records_is_resumed_and_the_next_one_has_none(setting: Setting) -> None:
    setting.emit(*setting.names(12))
    run(setting, {"url": URL})
    assert all(is_plain(setting, place) for place in PLACES)
    setting.emit(*names(8, 100))
    assert set(run(setting, KAFKA)) <= set(names(8, 100))
    assert not any(is_plain(setting, place) for place in PLACES)


def test_a_key_store_may_be_added_later(setting: Setting, tmp_path: Path) -> None:
    setting.emit(*setting.names(12))
    run(setting, KAFKA)
    setting.emit(*names(8, 100))
    with_store = KAFKA | {"key_store": f"sqlite:///{tmp_path}/keys.db"}
    assert set(run(setting, with_store)) <= set(names(8, 100))
    with pytest.raises(ConfigError, match=r"log\.key_store names none"):
        num_records(setting, "replay.", KAFKA)
