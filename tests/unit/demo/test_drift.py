"""The rehearsal over a fleet of tiny models. Where a prompt has its answer, memory drafts that, so agreement falls with
other prompts and comes back, whatever is learned meanwhile."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from omnidraft import assembly
from omnidraft.config import Settings
from omnidraft.demo.drift import ALARM, CHANGE, RECOVERY, Rehearsal, conclude
from omnidraft.demo.recorded_worker import RecordedWorker
from omnidraft.distill.ingest import topic_scan
from omnidraft.fleet.drift import MIN_VALUES, PASSES_PER_VALUE, RECENT
from omnidraft.traces import codec
from omnidraft.traces.record import TraceRecord
from tests.tiny_fleet import fleet_settings, running_fleet
from tests.tiny_pair import make_beliefs
from tests.trace_records import make_record

NUM_TOKENS = 2 * PASSES_PER_VALUE + 2
"""Tokens of an answer: with one drafted at a time it is one value of the controller's even where all are accepted."""


def answers(settings: Settings, have_been_said: list[bool]) -> list[TraceRecord]:
    """Greedy answers of random tokens, of which some are in their prompts, too."""
    tokenizers = assembly.vocabularies(settings)
    names = {"target": settings.models.target, "drafter": settings.models.drafter}
    vocab_size, names["alignment"] = len(tokenizers.target.vocabulary), tokenizers.alignment.fingerprint
    made = []
    for number, has_been_said in enumerate(have_been_said):
        ids = np.random.default_rng(number).integers(10, vocab_size, NUM_TOKENS, dtype=np.uint32)
        own = {"prompt_ids": ids if has_been_said else ids[:4], "drafter_prompt_ids": ids[:4] % 10, "emitted_ids": ids}
        own |= {"beliefs": make_beliefs(ids.tolist(), vocab_size, number), "temperature": 0.0, "top_p": None}
        made.append(make_record(f"r{number}", num_emitted=NUM_TOKENS, **own, **names))
    return made


def test_the_controller_sees_traffic_change_and_come_back(
    tiny_models: tuple[Path, Path],
    omnidraft_home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    learner = {"records_per_step": 2, "steps_per_snapshot": 4, "held_out_every": 8}
    worker_section = {"poll_s": 0.01, "max_queue": 2}
    settings = fleet_settings(tiny_models, tmp_path, learner=learner, recorder={"top_k": 4}, worker=worker_section)
    settings = settings.model_copy(update={"decode": settings.decode.model_copy(update={"num_draft_tokens": 1})})
    before, after = [True] * (MIN_VALUES + 2), [False] * 4 + [True] * 2 * RECENT
    records = answers(settings, before + after)
    with running_fleet(settings, tmp_path), closing(RecordedWorker(settings)) as worker:
        rehearsal = Rehearsal(settings, worker)
        rehearsal.run(records[: len(before)], records[len(before) :])
    marks = rehearsal.marks_ms
    assert marks[CHANGE] < marks[ALARM] < marks[RECOVERY]
    read = topic_scan.messages(assembly.log_reader(settings, settings.log.traces_topic))
    for message, record in zip(read, records, strict=False):
        written = codec.decode(message.value, message.headers)
        assert (written.emitted_ids == record.emitted_ids).all()
        assert (written.beliefs.top_log_p_EK == record.beliefs.top_log_p_EK).all()
    conclude(rehearsal, tmp_path / "run")
    assert "the recovery" in (said := capsys.readouterr().out)
    assert "did not come" not in said
    assert (tmp_path / "drift.png").read_bytes().startswith(b"\x89PNG")
    del marks[RECOVERY]
    conclude(rehearsal, tmp_path / "run")
    assert "the recovery did not come" in capsys.readouterr().out
