"""Responses that the openai client got from a server teach what the server's own target would have taught."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from omnidraft.cli.replay import AS_SET, replay
from omnidraft.config import WorkerSettings
from omnidraft.errors import RequestError
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.snapshots import bundle
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import archive
from omnidraft.traces.record import TraceRecord
from pipelines import record
from tests.cli_runs import Environ
from tests.cli_runs import run_pipeline as run
from tests.http_server import served
from tests.tiny_engine import PATIENCE_S, tiny_worker

NUM_ANSWERS, NUM_TOKENS = 24, 12


@pytest.fixture(autouse=True)
def environ(pipeline_environ: Environ) -> None:
    pipeline_environ({"OMNIDRAFT_RECORDER__TOP_K": "5"})


@pytest.fixture(scope="module")
def client(tiny_models: tuple[Path, Path], omnidraft_home: Path) -> Iterator[openai.OpenAI]:
    """The real client, over our own server."""
    requests = RequestQueue(CountingMetrics(), max_waiting=2)
    engine = tiny_worker(tiny_models, omnidraft_home, CountingMetrics()).engine
    app = application(requests, [ServedModel(engine, "print")], WorkerSettings(), lambda: b"")
    with served(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
    requests.close(PATIENCE_S)


@pytest.fixture(scope="module")
def answered(client: openai.OpenAI, tiny_models: tuple[Path, Path]) -> list[str]:
    """What docs/train.md tells to do. Ids that spell nothing are kept out: they are in no response."""
    spelled = load_tokenizer(tiny_models[0]).vocabulary.token_bytes
    bias = {str(token): -100 for token, data in enumerate(spelled) if not data}
    same = {"model": str(tiny_models[0]), "logprobs": True, "top_logprobs": 5, "max_tokens": NUM_TOKENS}
    lines = []
    for number in range(NUM_ANSWERS):
        messages = [{"role": "user", "content": f"Question {number}: how many clips?"}]
        body: dict[str, Any] = same | {"messages": messages, "seed": number, "logit_bias": bias}
        response = client.chat.completions.create(**body)
        lines.append(json.dumps({"request": body, "response": response.model_dump()}) + "\n")
    return lines


@pytest.fixture
def responses(answered: list[str], tmp_path: Path) -> Path:
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(answered))
    return path


def read(path: Path) -> list[TraceRecord]:
    return list(archive.read(path))


def test_records_of_responses_are_those_of_the_target_that_answered(responses: Path, tmp_path: Path) -> None:
    run(record.main, "--from-api", responses, "--out", tmp_path / "api.avro", "--tenant", "theirs")
    imported = read(tmp_path / "api.avro")
    assert [len(each.emitted_ids) for each in imported] == [NUM_TOKENS] * NUM_ANSWERS
    answers = tmp_path / "answers.jsonl"
    rows = [
        {"prompt": f"Question {number}: how many clips?", "answer_ids": each.emitted_ids.tolist()}
        for number, each in enumerate(imported)
    ]
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(record.main, "--answers", answers, "--out", tmp_path / "own.avro")
    for mine, theirs in zip(read(tmp_path / "own.avro"), imported, strict=True):
        assert mine.beliefs is not None
        assert theirs.beliefs is not None
        assert mine.prompt_ids.tolist() == theirs.prompt_ids.tolist()
        assert mine.drafter_prompt_ids.tolist() == theirs.drafter_prompt_ids.tolist()
        np.testing.assert_allclose(theirs.beliefs.emitted_log_p_E, mine.beliefs.emitted_log_p_E, atol=0.02)
        for row_mine, row_theirs in zip(mine.beliefs.top_ids_EK, theirs.beliefs.top_ids_EK, strict=True):
            assert len(set(row_mine.tolist()) - set(row_theirs.tolist())) <= 1  # of two equally likely ones
        mass = np.exp(theirs.beliefs.top_log_p_EK.astype(float)).sum(1) + np.exp(
            theirs.beliefs.tail_log_p_E.astype(float)
        )
        np.testing.assert_allclose(mass, 1, atol=5e-3)


@pytest.mark.long
def test_a_drafter_learns_from_responses(responses: Path, tmp_path: Path) -> None:
    imported = tmp_path / "new" / "api.avro"
    run(record.main, "--from-api", responses, "--out", imported)
    run(replay, "--log", imported, "--snapshots", tmp_path / "made", "--held-out-every", 4)
    manifest = bundle.verify(tmp_path / "made" / AS_SET, ["serving"])
    assert manifest.num_records
    assert manifest.losses["dm"] > 0


def test_refused_answers_are_told_and_nothing_but_refused_ones_is_an_error(
    responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in responses.read_text().splitlines()]
    for row in rows[1:]:
        row["response"]["choices"][0]["logprobs"]["content"][0]["bytes"] = list(b"no token at all")
    responses.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(record.main, "--from-api", responses, "--out", tmp_path / "some.avro")
    said = capsys.readouterr()
    assert f"refused {NUM_ANSWERS - 1} answers with tokens that the target's vocabulary does not have" in said.err
    assert said.out.startswith(f"1 answers, {NUM_TOKENS} tokens")
    with pytest.raises(RequestError, match=rf"nothing to learn .*refused {NUM_ANSWERS - 1} answers"):
        run(record.main, "--from-api", responses, "--skip", 1, "--out", tmp_path / "none.avro")
    assert not (tmp_path / "none.avro").exists()


def test_one_source_is_needed(responses: Path, tmp_path: Path) -> None:
    for sources in ((), ("--from-api", responses, "--answers", responses)):
        with pytest.raises(RequestError, match="exactly one of"):
            run(record.main, *sources, "--out", tmp_path / "out.avro")
    for option in (("--split", "train"), ("--max-new-tokens", 8)):
        with pytest.raises(RequestError, match=f"{option[0]} is for prompts"):
            run(record.main, "--from-api", responses, *option, "--out", tmp_path / "out.avro")
