"""A learner goes on from the state that an earlier release saved, and makes of it what that release would have made."""

import time
from pathlib import Path

import pytest

from omnidraft import config, wiring
from omnidraft.distill.ingest.crash_journal import CrashJournal
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.wiring.audit import audit
from tests.migration.earlier_release import expected

EXACT = (
    *("target", "drafter", "drafter_hash", "alignment", "train", "log_id", "restarts", "offsets", "num_records"),
    *("num_tokens", "num_steps", "held_out_records", "counts"),
)
NUMBERS = ("agreement_before", "agreement_after")
TIMEOUT_S = 60.0


def learn(settings: config.Settings, up_to: int, folder: Path) -> None:
    """Run a distiller until it has published this version."""
    distiller = wiring.distillation(settings, CountingMetrics(), folder=folder)
    deadline_s = time.monotonic() + TIMEOUT_S

    def stop() -> bool:
        return (distiller.status().version or 0) >= up_to or time.monotonic() > deadline_s

    distiller.run(stop)


def test_learning_goes_on_at_the_stored_offsets_and_publishes_what_the_earlier_release_would(
    deployment: config.Settings, tmp_path: Path
) -> None:
    rows = expected("continued.json")
    learn(deployment, rows[-1]["version"], tmp_path / "distiller")
    versions = wiring.registry(deployment).versions()
    newer = [version for version in versions if version.version >= rows[0]["version"]]
    assert [version.version for version in newer] == [row["version"] for row in rows]
    for version, row in zip(newer, rows, strict=True):
        manifest = version.manifest.model_dump(mode="json")
        assert {name: manifest[name] for name in EXACT} == {name: row["manifest"][name] for name in EXACT}
        assert manifest["losses"] == pytest.approx(row["manifest"]["losses"], rel=1e-3)
        assert [manifest[name] for name in NUMBERS] == pytest.approx([row["manifest"][name] for name in NUMBERS])
    assert newer[0].manifest.parent_id == expected("versions.json")[-1]["manifest"]["snapshot_id"]
    assert sorted(newer[-1].aliases) == rows[-1]["aliases"]


def test_the_audit_finds_every_record_of_the_stored_log_accounted_for(deployment: config.Settings) -> None:
    assert audit(deployment).faults == ()


def test_the_journal_of_a_learner_that_died_names_the_same_records(deployment: config.Settings) -> None:
    """The file was left by a process that died in its second step over the same two records; this is the third."""
    places = [(0, 3), (1, 4), (1, 5)]
    assert CrashJournal(Path("trying.json"), tries=2).suspects(places) == places[:2]
