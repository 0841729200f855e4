"""What the pipelines promise: reports on disk, records equal to plain decoding's."""

import json
from pathlib import Path

import pytest

from omnidraft.decode.loop import Decoder
from omnidraft.ports import Sampling, Source
from pipelines import report
from pipelines.record import KnownAnswer
from tests.unit.decode.toys import emitted, make_drafter, make_request, toy_decoder

ROW = {
    "agreement": 0.5,
    "tokens_per_pass": 2.0,
    "tokens_per_s": 20.0,
    "plain_tokens_per_s": 10.0,
    "speedup": 2.0,
}


def test_a_report_is_a_table_a_picture_and_a_file(tmp_path: Path) -> None:
    rows = [ROW | {"version": None}, ROW | {"version": 1}]
    assert report.table(rows).row_count == 2
    report.picture(rows, tmp_path / "report.png")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    report.save({"rows": rows}, tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == {"rows": rows}


@pytest.fixture
def decoder() -> Decoder:
    return toy_decoder(trace_top_k=4)


@pytest.mark.parametrize("num_right", [0, 1, 5, 7, 24])
def test_a_known_answer_only_drafts_and_the_target_writes_the_text(decoder: Decoder, num_right: int) -> None:
    request = make_request(Sampling(1.0))
    plain = list(decoder.decode(request, None))
    answer = emitted(plain)
    known = [*answer[:num_right], *[(token + 1) % 2 + 2 for token in answer[num_right:]]]
    steps = list(decoder.decode(request, KnownAnswer(known, make_drafter())))
    assert emitted(steps) == answer
    assert "".join(step.text for step in steps) == "".join(step.text for step in plain)
    num_followed = next((at for at, (a, b) in enumerate(zip(known, answer, strict=True)) if a != b), len(answer))
    looked_up = [step for step in steps if Source.LOOKUP in step.tree.sources]
    assert sum(len(step.path) for step in looked_up) <= num_followed
    assert len(looked_up) <= num_followed // 6 + 1
    if num_followed < len(answer) - 1:
        assert any(set(step.tree.sources[1:]) - {Source.LOOKUP} for step in steps)


def test_an_answer_that_is_known_whole_takes_few_passes(decoder: Decoder) -> None:
    request = make_request(Sampling(0.0))
    answer = emitted(decoder.decode(request, None))
    steps = list(decoder.decode(request, KnownAnswer(answer, make_drafter())))
    assert len(steps) == -(-len(answer) // 6)
