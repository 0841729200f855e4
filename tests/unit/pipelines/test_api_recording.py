"""What `pipelines.record --from-api` makes of responses that servers really give, and what it refuses."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from omnidraft import assembly, config
from omnidraft.errors import RequestError
from omnidraft.traces import codec
from pipelines.lib import api_answers
from pipelines.lib.api_recording import (
    CALLS,
    FOREIGN,
    MODEL_REFUSED,
    NO_ANSWER,
    NO_LOGPROBS,
    NOT_SPELLED,
    PROMPT,
    ApiRecording,
)
from tests.tiny_engine import tiny_settings

MESSAGES = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "?"}]}]
TEXT = "She sold 48 clips \u20ac\U0001f680 in May."

Row = dict[str, Any]


@pytest.fixture
def settings(tiny_models: tuple[Path, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch) -> config.Settings:
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    return tiny_settings(tiny_models)


@pytest.fixture
def tokenizers(settings: config.Settings) -> assembly.Vocabularies:
    return assembly.vocabularies(settings)


@pytest.fixture
def row(tokenizers: assembly.Vocabularies) -> Row:
    """A response of OpenAI's shape, with fields that nobody here reads."""
    spelled = [tokenizers.target.vocabulary.token_bytes[token] for token in tokenizers.target.encode(TEXT)]
    entries = [entry(data) for data in spelled]
    message = {"role": "assistant", "content": TEXT, "refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "logprobs": {"content": entries, "refusal": None}}
    response = {"id": "chatcmpl-1", "object": "chat.completion", "choices": [choice | {"finish_reason": "stop"}]}
    return {"request": {"model": "x", "messages": copy.deepcopy(MESSAGES), "logprobs": True}, "response": response}


def entry(data: bytes) -> Row:
    text = data.decode() if data.isascii() else "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
    own = {"token": text, "bytes": list(data), "logprob": -0.25}
    return own | {"top_logprobs": [own, {"token": " in", "bytes": list(b" in"), "logprob": -3.5}]}


@pytest.fixture
def exchanges(tmp_path: Path) -> Callable[..., list[api_answers.ApiExchange]]:
    """Write rows to a file and read them."""

    def read(*rows: Row) -> list[api_answers.ApiExchange]:
        path = tmp_path / "responses.jsonl"
        path.write_text("\n".join(json.dumps(each) for each in rows) + "\n\n")
        return api_answers.read(path)

    return read


def choice_of(row: Row) -> Row:
    choice: Row = row["response"]["choices"][0]
    return choice


def test_an_answer_becomes_the_records_of_a_request(
    settings: config.Settings, tokenizers: assembly.Vocabularies, row: Row, exchanges: Any
) -> None:
    recording = ApiRecording(settings, "team")
    records = recording.records_of(exchanges(row)[0])
    ids = tokenizers.target.encode(TEXT)
    assert [token for each in records for token in each.emitted_ids.tolist()] == ids
    assert [each.finish_reason for each in records] == ["stop"]
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "?"}]
    assert records[0].prompt_ids.tolist() == tokenizers.target.chat_prompt_ids(plain)
    assert records[0].drafter_prompt_ids.tolist() == tokenizers.drafter.chat_prompt_ids(plain)
    assert {(each.tenant, each.alignment) for each in records} == {("team", tokenizers.alignment.fingerprint)}
    assert not any(each.is_drawn_from_logprobs for each in records)
    assert {codec.decode(codec.encode(each), codec.headers(each)).request_id for each in records} == {
        records[0].request_id
    }
    assert not recording.refused


def test_choices_and_answers_have_ids_of_their_own_which_stay_the_same(
    settings: config.Settings, row: Row, exchanges: Any
) -> None:
    row["response"]["choices"] *= 2
    other = json.loads(json.dumps(row))
    other["request"]["messages"][1]["content"] = "Another?"
    read = exchanges(row, other)
    first, again = ([ApiRecording(settings, "team").records_of(each) for each in read] for _ in range(2))
    ids = [{record.request_id for record in records} for records in first]
    assert ids == [{record.request_id for record in records} for records in again]
    assert len(ids[0] | ids[1]) == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: row["response"].clear(), NO_ANSWER),
        (lambda row: row.update(response={"error": {"message": "overloaded"}}), NO_ANSWER),
        (lambda row: choice_of(row)["message"].update(content=None), NO_ANSWER),
        (lambda row: choice_of(row)["message"].update(content=None, refusal="I cannot."), MODEL_REFUSED),
        (lambda row: choice_of(row)["message"].update(content=None, tool_calls=[{"id": "1"}]), CALLS),
        (lambda row: choice_of(row).update(logprobs=None), NO_LOGPROBS),
        (lambda row: choice_of(row).pop("logprobs"), NO_LOGPROBS),
        (lambda row: choice_of(row)["logprobs"].update(content=None), NO_LOGPROBS),
        (lambda row: choice_of(row)["logprobs"]["content"][2].update(logprob=None), NO_LOGPROBS),
        (lambda row: choice_of(row)["logprobs"]["content"][1].update(bytes=list(b"sold 48")), FOREIGN),
        (lambda row: choice_of(row)["logprobs"]["content"].pop(1), NOT_SPELLED),
        (lambda row: row["request"]["messages"].clear(), PROMPT),
        (lambda row: row["request"].update(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), PROMPT),
    ],
)
def test_what_teaches_nothing_is_refused_and_counted(
    settings: config.Settings, row: Row, exchanges: Any, change: Callable[[Row], None], reason: str
) -> None:
    change(row)
    recording = ApiRecording(settings, "team")
    assert recording.records_of(exchanges(row)[0]) == []
    assert recording.refused == {reason: 1}


def test_without_bytes_the_text_of_a_token_says_them(
    settings: config.Settings, tokenizers: assembly.Vocabularies, row: Row, exchanges: Any
) -> None:
    for each in choice_of(row)["logprobs"]["content"]:
        each["bytes"] = None
        each["top_logprobs"] = []
    recording = ApiRecording(settings, "team")
    records = recording.records_of(exchanges(row)[0])
    assert not recording.refused
    assert [token for each in records for token in each.emitted_ids.tolist()] == tokenizers.target.encode(TEXT)


@pytest.mark.parametrize("end", ["", "\ufffd"])
def test_a_text_that_ends_inside_a_character_keeps_its_tokens(
    settings: config.Settings, tokenizers: assembly.Vocabularies, row: Row, exchanges: Any, end: str
) -> None:
    choice = choice_of(row)
    entries = choice["logprobs"]["content"]
    first = list("\U0001f680".encode()[:1])
    (num,) = [n for n, each in enumerate(entries) if each["bytes"][:1] == first and len(each["bytes"]) < 4]
    choice["logprobs"]["content"] = entries[: num + 1]
    choice["message"]["content"] = TEXT[: TEXT.index("\U0001f680")] + end
    choice["finish_reason"] = "length"
    records = ApiRecording(settings, "team").records_of(exchanges(row)[0])
    assert [token for each in records for token in each.emitted_ids.tolist()] == tokenizers.target.encode(TEXT)[
        : num + 1
    ]
    assert records[-1].finish_reason == "length"


@pytest.mark.parametrize("line", ["{", "[]", '{"request": {}}', '{"response": {"choices": []}}', '{"prompt": "x"}'])
def test_a_file_of_something_else_is_refused_by_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text(f"\n{line}\n")
    with pytest.raises(RequestError, match=r"responses\.jsonl:2 needs a JSON object"):
        api_answers.read(path)
    with pytest.raises(RequestError, match="cannot read"):
        api_answers.read(tmp_path / "missing.jsonl")
