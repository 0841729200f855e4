"""One process answers, learns in its idle moments, and goes on after any end from what its home holds."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnidraft import SamplingParams
from omnidraft.bus import sqlite_log
from omnidraft.device.learning import IdleLearning
from omnidraft.distill.ingest import poison_detector
from omnidraft.distill.ingest.record_disposition import Disposition
from omnidraft.errors import ConfigError
from omnidraft.ports import SnapshotVersion
from omnidraft.registry.directory_registry import DirectoryRegistry
from tests.integration.device_llm import NUM_ASKED, PARAMS, TOPIC, ask, num_recorded, open_llm

ROOT = Path(__file__).parents[2]
WAIT_S = 120.0


@pytest.fixture(autouse=True)
def environ(omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))


def learning_of(llm: object) -> IdleLearning:
    learning = getattr(llm, "learning", None)
    assert isinstance(learning, IdleLearning)
    return learning


def versions(home: Path, models: tuple[Path, Path]) -> tuple[SnapshotVersion, ...]:
    target, drafter = map(str, models)
    return DirectoryRegistry(home / "snapshots", drafter, target, keep_resume=2).versions()


def assert_each_record_has_one_fate(home: Path, models: tuple[Path, Path]) -> None:
    """All records up to the newest snapshot's offset are learned or held out, each once."""
    manifest = versions(home, models)[-1].manifest
    learned_to = sum(manifest.offsets.values())
    assert manifest.num_records + manifest.counts.get(Disposition.HELD_OUT.value, 0) == learned_to, manifest.counts
    assert Disposition.DUPLICATE.value not in manifest.counts
    assert num_recorded(home) - 16 < learned_to <= num_recorded(home)


def test_what_is_asked_is_learned_and_the_next_start_goes_on(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    plain = open_llm(None, tiny_models)
    with open_llm(tmp_path, tiny_models, learning_rate=1e-2) as llm:
        learning = learning_of(llm)
        first = ask(llm, 12)
        assert learning.wait(WAIT_S)
        second = ask(llm, 12, first=12)
        llm.generate("Not this.", SamplingParams(max_tokens=4, store=False), use_tqdm=False)
        assert "".join(llm.stream("How many?", PARAMS)) == "".join(plain.stream("How many?", PARAMS))
        assert learning.wait(WAIT_S)
        assert learning.problem is None
        with pytest.raises(ConfigError, match="learns in"):
            open_llm(tmp_path, tiny_models)
    assert first + second == ask(plain, 24), "the drafter never shows in the text"
    assert num_recorded(tmp_path) == 25
    before = versions(tmp_path, tiny_models)[-1].manifest
    assert before.num_tokens > before.num_records >= 4

    champion = next(each for each in versions(tmp_path, tiny_models) if "champion" in each.aliases)
    with open_llm(tmp_path, tiny_models, learning_rate=1e-2) as llm:
        learning = learning_of(llm)
        assert llm._engine.slot.current.version == champion.version
        ask(llm, 24, first=24)  # all but one are held out, so that no step is full, once in 5e9 runs
        assert learning.wait(WAIT_S)
        learning.close()
        ask(llm, 1)
    after = versions(tmp_path, tiny_models)[-1].manifest
    assert after.num_records > before.num_records
    assert after.agreement_after is not None
    assert num_recorded(tmp_path) == 25 + 24, "after close nothing is recorded"
    assert_each_record_has_one_fate(tmp_path, tiny_models)
    assert_is_tidy(tmp_path, tiny_models)
    assert_is_of_one_pair(tmp_path, tiny_models)


def assert_is_tidy(home: Path, models: tuple[Path, Path]) -> None:
    """Weights of old versions and learned records are gone."""
    known = versions(home, models)
    assert len(known) > 3
    (folder,) = (home / "snapshots").glob("*")
    kept = {each.version for each in known if each.aliases} | {each.version for each in known[-2:]}
    with_weights = {int(path.parents[2].name[1:]) for path in folder.glob("v*/snapshot/serving/ngrams.safetensors")}
    assert with_weights == kept
    reader = sqlite_log.SqliteReader(home / "log.db", TOPIC)
    assert reader.first_offsets()[0] == known[-2].manifest.offsets[0] > 0
    reader.close()


def assert_is_of_one_pair(home: Path, models: tuple[Path, Path]) -> None:
    for others in ((models[0], models[0]), (models[1], models[1])):
        with pytest.raises(ConfigError, match="is the home of"):
            open_llm(home, others)
    with pytest.raises(ConfigError, match=r"learner\.train"):
        open_llm(home, models, train="full")


def test_a_process_that_is_killed_loses_nothing_and_repeats_nothing(
    tiny_models: tuple[Path, Path], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.integration.device_llm", str(tmp_path), *map(str, tiny_models)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    imported = {name.partition(".")[0] for name in (tmp_path / "modules.txt").read_text().split("\n")}
    assert "torch" in imported
    assert not imported & {"ray", "mlflow", "kafka"}

    with open_llm(tmp_path, tiny_models) as llm:
        learning = learning_of(llm)
        assert learning.wait(WAIT_S)
    assert num_recorded(tmp_path) == 2 * NUM_ASKED, "every answer was acknowledged before the process was killed"
    assert_each_record_has_one_fate(tmp_path, tiny_models)
    judged = [each for each in versions(tmp_path, tiny_models) if "champion" in each.aliases]
    assert judged


@pytest.mark.long
def test_records_are_not_poison_because_processes_end_in_requests_for_which_their_step_waits(
    tiny_models: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two deaths over a step would do, there as here."""
    monkeypatch.setattr(poison_detector, "TRIES", 1)
    command = [
        sys.executable,
        "-m",
        "tests.integration.device_llm",
        str(tmp_path),
        *map(str, tiny_models),
        "at-the-gate",
    ]
    done = subprocess.run(command, cwd=ROOT, env=os.environ.copy(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with open_llm(tmp_path, tiny_models) as llm:
        assert learning_of(llm).wait(WAIT_S)
    assert_each_record_has_one_fate(tmp_path, tiny_models)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"learn": True}, "belong together"),
        ({"home": "there"}, "belong together"),
        ({"learn": True, "home": "there", "snapshot": "champion"}, "without a snapshot"),
        ({"learn": True, "home": "there", "drafter": "none"}, "needs a drafter"),
        ({"learn": True, "home": "there", "worker": {"snapshot": "3"}}, "worker.snapshot"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(
    given: dict, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from omnidraft import LLM

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        LLM("no-such-model", **given)
    assert not (tmp_path / "there").exists()
