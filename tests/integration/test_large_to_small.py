"""A small model learns a large one's answers by several losses, on tiny real models."""

import json
from pathlib import Path
from typing import Any

import pytest

from omnidraft.errors import ConfigError, RequestError
from pipelines import large_to_small, record
from pipelines.large_to_small import AS_IT_COMES, answer_of, difference
from tests.cli_runs import Environ, made_once
from tests.cli_runs import run_pipeline as run

ANSWERS = ["She sold 48 clips in April.", "A number: 10 11 12", "Natalia sold half as many in May."]


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ) -> None:
    pipeline_environ({"OMNIDRAFT_LEARNER__LEARNING_RATE": "3e-3"})


@pytest.fixture(scope="module")
def archives() -> dict[str, bytes]:
    """What was recorded once, for all tests."""
    return {}


@pytest.fixture
def recorded(tmp_path: Path, archives: dict[str, bytes]) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [{"prompt": f"Question {n}: how many clips?", "answer": ANSWERS[n % len(ANSWERS)]} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made_once(archives, tmp_path / "traces.avro", record.main, "--answers", path)


def questions(tmp_path: Path, reference: str | None = "She sold 40 + 8 = 48.\n#### 48") -> Path:
    path = tmp_path / "questions.jsonl"
    rows = [{"prompt": f"Question {n}?", "split": "test", "reference": reference} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_loss_learns_the_same_answers_from_the_same_weights(
    recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, losses = tmp_path / "figures.json", ["nll", "alm + nll", "dm"]
    given = [part for loss in losses for part in ("--loss", loss)]
    asked = ("--questions", questions(tmp_path), "--num-questions", 3, "--max-new-tokens", 8)
    run(large_to_small.main, "--answers", recorded, *given, "--num-passes", 8, *asked, "--json", out)
    report: dict[str, Any] = json.loads(out.read_text())
    rows = report["rows"]
    assert list(rows) == [AS_IT_COMES, *losses]
    assert (report["train"] + report["held_out"], report["questions"]) == (24, 3)
    first = rows[AS_IT_COMES]["bits_per_byte"]
    for loss in losses:
        assert rows[loss]["bits_per_byte"] < 0.9 * first or "nll" not in loss  # a tiny target believes in no answer
        assert rows[loss]["bits_per_byte"] != first
        assert len(rows[loss]["answers"]) == 3
        assert rows[loss]["right"] == sum(answer_of(text) == 48 for text in rows[loss]["answers"])
    assert rows["nll"]["bits_per_byte"] == pytest.approx(
        sum(bits for bits, _ in rows["nll"]["bits_and_bytes"]) / sum(num for _, num in rows["nll"]["bits_and_bytes"])
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)


def test_a_row_does_not_depend_on_those_before_it(recorded: Path, tmp_path: Path) -> None:
    alone, behind = tmp_path / "alone.json", tmp_path / "behind.json"
    run(large_to_small.main, "--answers", recorded, "--loss", "dm", "--json", alone)
    run(large_to_small.main, "--answers", recorded, "--loss", "nll", "--loss", "dm", "--json", behind)
    names = ("agreement", "bits_and_bytes")
    mine, other = (json.loads(path.read_text())["rows"]["dm"] for path in (alone, behind))
    assert {name: mine[name] for name in names} == {name: other[name] for name in names}


def test_what_cannot_be_measured_is_refused_before_anything_is_learned(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no loss 'nonsense'"):
        run(large_to_small.main, "--answers", recorded, "--loss", "nll", "--loss", "nonsense")
    without = questions(tmp_path, reference="a text")
    with pytest.raises(RequestError, match="no row of the split test whose reference has a number"):
        run(large_to_small.main, "--answers", recorded, "--loss", "nll", "--questions", without)


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 1,080", 1080.0), ("it is -3.5.", -3.5), ("$12, so 7 left", 7.0), ("none", None), ("\\boxed{72}", 72.0)],
)
def test_the_answer_is_the_last_number(text: str, number: float | None) -> None:
    assert answer_of(text) == number


def test_differences_are_paired_by_answer() -> None:
    mine, other = [(10.0, 10), (30.0, 10), (20.0, 10)], [(12.0, 10), (31.0, 10), (23.0, 10)]
    mean, error = difference(mine, other)
    assert mean == pytest.approx(-0.2)
    assert error == pytest.approx(0.1 / 3**0.5)
