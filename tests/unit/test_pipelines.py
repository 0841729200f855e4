"""What the pipelines promise: errors that name file and line, reports on disk, records equal to plain decoding's."""

import json
from pathlib import Path

import pytest

from omnidraft.decode.loop import Decoder
from omnidraft.errors import RequestError
from omnidraft.ports import Sampling, Source
from pipelines import prompts, report
from pipelines.record import KnownAnswer
from tests.unit.decode.toys import emitted, make_drafter, make_request, toy_decoder

ROW = {
    "agreement": 0.5,
    "tokens_per_pass": 2.0,
    "tokens_per_s": 20.0,
    "plain_tokens_per_s": 10.0,
    "speedup": 2.0,
}


@pytest.mark.parametrize(
    "line",
    ["{", "5", "[]", '{"other": 1}', '{"prompt": 5}', '{"prompt": ""}', '{"prompt": "a", "answer_ids": 3}'],
)
def test_a_bad_prompt_is_refused_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n\n{line}\n')
    with pytest.raises(RequestError, match=f"{path}:3 needs a JSON object with a prompt or question"):
        prompts.read(path)


def test_prompts_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"question": "a"}, {"prompt": "b", "answer_ids": [1, 2]}, {"prompt": "c"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert prompts.read(path, 1, skip=1) == [prompts.Prompt("b", (1, 2))]
    assert [prompt.text for prompt in prompts.read(path)] == ["a", "b", "c"]
    with pytest.raises(RequestError, match="no prompts after the first 3"):
        prompts.read(path, skip=3)
    with pytest.raises(RequestError, match=r"cannot read prompts: .*nowhere"):
        prompts.read(tmp_path / "nowhere")


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
