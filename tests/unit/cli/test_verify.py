"""An answer with a receipt is computed again by another command, whatever drafted; what was changed is found."""

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from fastapi.testclient import TestClient

from omnidraft import assembly
from omnidraft.config import WorkerSettings
from omnidraft.decode.receipt import PAYLOAD_TYPE, ReceiptSigner, read_receipt
from omnidraft.serving.app import ServedModel, application
from omnidraft.serving.request_queue import RequestQueue
from omnidraft.snapshots.keys import PrivateKey, envelope, new_private_key
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_drafter, make_target
from omnidraft.traces import archive
from omnidraft.whatif import log_slice
from tests.cli_runs import run_cli, tiny_pair_environ
from tests.http_server import events
from tests.tiny_engine import PATIENCE_S, tiny_settings

SECRET = new_private_key()
PUBLIC = PrivateKey(SECRET).public_text("worker")
CHAT = {"messages": [{"role": "user", "content": "How many clips?"}], "max_tokens": 24, "temperature": 0.9}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "penalties": {"frequency_penalty": 1.5, "repetition_penalty": 1.3, "seed": -7},
    "cuts": {"top_p": 0.8, "top_k": 40, "min_p": 0.01, "logit_bias": {"65": 4.5}, "seed": 2**63},
    "limits": {"min_tokens": 20, "bad_words": ["a"], "allowed_token_ids": list(range(60, 300)), "stop": ["e", "cl"]},
    "grammar": {"structured_outputs": {"regex": "[a-f]{4,20}"}},
    "choices": {"n": 3, "seed": 11},
    "digests": {"receipt": "digests", "return_token_ids": True, "n": 2},
}

LOOK = {"name": "look", "strict": True, "parameters": {"type": "object", "additionalProperties": False}}
ENDS = {"logit_bias": {"2": 100}, "max_tokens": 300}
"""The end of the turn, as soon as the grammar allows it."""
SHOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT | {"n": 2}),
    "stream": ("chat/completions", CHAT | {"stream": True, "n": 2}),
    "kept stop": ("chat/completions", CHAT | {"stop": ["e", "cl"], "include_stop_str_in_output": True}),
    "special tokens": ("chat/completions", CHAT | {"skip_special_tokens": False, "logit_bias": {"1": 100}}),
    "thoughts": (
        "chat/completions",
        CHAT | {"thinking_token_budget": 5, "structured_outputs": {"regex": r"Three\."}, "max_tokens": 40},
    ),
    "calls": (
        "chat/completions",
        CHAT | ENDS | {"tools": [{"type": "function", "function": LOOK}], "tool_choice": "required"},
    ),
    "echo": ("completions", {"prompt": ["How many", "Two"], "echo": True, "max_tokens": 9}),
    "streamed completion": ("completions", {"prompt": "How many", "stream": True, "max_tokens": 9}),
    "response": ("responses", {"input": "How many?", "max_output_tokens": 30}),
    "calls of a response": (
        "responses",
        {"input": "How many?", "tools": [{"type": "function", **LOOK}], "tool_choice": "required"},
    ),
}
"""Requests, by what their responses show."""
TEXTS = ("content", "text", "reasoning", "reasoning_content", "name", "arguments", "model", "finish_reason")
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "answer must be ids": {"answer": [70, 500]},
    "answer must be ids from 0": {"answer": [-1]},
    "the prompt is empty": {"prompt": []},
    "prompt must be ids": {"prompt": [500]},
    "temperature must be": {"sampling": {"temperature": -1}},
    "stop_ids must be ids": {"stop_ids": [-1], "min_new_tokens": 2},
    "the length of bad_ids": {"bad_ids": [[]]},
    "max_new_tokens must be": {"max_new_tokens": 0},
    "maximum context length": {"max_new_tokens": 10**6},
    "it is no receipt": {"time_ms": 10**18},
    "it is no receipt of": {"choice": -1},
    "not checked: ": {
        "model": {"name": "gpt-5", "weights": "", "kernels": "forged\nc.json: the same bits", "tokenizer": ""}
    },
    "not checked: [Errno ": {"model": {"name": "a" * 3000, "weights": "", "kernels": "", "tokenizer": ""}},
}
"""What a key may sign and no request has, by what is said of it; the last names a model that is not here."""

Verify = Callable[..., CompletedProcess[str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two targets of one tokenizer whose texts differ, and a drafter."""
    root = tmp_path_factory.mktemp("receipts")
    made = {name: make_target(root / name, seed=seed, spread=0.3) for seed, name in enumerate(("target", "other"))}
    shutil.copytree(made["target"], root / "thoughts")
    (root / "thoughts" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}assistant\n<think>\n"
    )
    return made | {"thoughts": root / "thoughts", "drafter": make_drafter(root / "drafter")}


@pytest.fixture(scope="module")
def worker(models: dict[str, Path], omnidraft_home: Path) -> assembly.Worker:
    return engine_of(models, "target", omnidraft_home)


def engine_of(models: dict[str, Path], target: str, home: Path) -> assembly.Worker:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMNIDRAFT_HOME", str(home))
        return assembly.engine(tiny_settings((models[target], models["drafter"])), CountingMetrics())


@pytest.fixture
def client(worker: assembly.Worker) -> Iterator[TestClient]:
    yield from client_of(worker, worker)


def client_of(worker: assembly.Worker, stated: assembly.Worker) -> Iterator[TestClient]:
    """The API over one model, whose receipts state another one."""
    requests = RequestQueue(CountingMetrics(), max_waiting=8)
    signer = ReceiptSigner(PrivateKey(SECRET), stated.served[0].identity)
    served = [ServedModel(worker.engine, "print", signer)]
    with TestClient(application(requests, served, WorkerSettings(), lambda: b"")) as made:
        yield made
    requests.close(PATIENCE_S)


@pytest.fixture
def verify(
    models: dict[str, Path], omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Verify:
    """Run `omnidraft verify` in this process, with a model of its own."""
    environ = tiny_pair_environ(omnidraft_home, (models["target"], models["drafter"]))
    return lambda *arguments: run_cli(("verify", *arguments), monkeypatch, capsys, environ)


def answered(client: TestClient, path: Path, **more: Any) -> dict[str, Any]:
    """A response with receipts, which is saved."""
    response = client.post("/v1/chat/completions", json=CHAT | {"receipt": True} | more)
    assert response.status_code == 200, response.text
    path.write_bytes(response.content)
    return response.json()


def payload_of(envelope: dict[str, Any]) -> dict[str, Any]:
    return json.loads(base64.b64decode(envelope["payload"]))


def signed(payload: dict[str, Any], path: Path) -> Path:
    """A receipt that says this, signed by the server all the same."""
    path.write_text(json.dumps(envelope(json.dumps(payload).encode(), PAYLOAD_TYPE, PrivateKey(SECRET))))
    return path


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED)
def test_an_answer_is_computed_again(asked: dict[str, Any], client: TestClient, verify: Verify, tmp_path: Path) -> None:
    answer = answered(client, tmp_path / "answer.json", **asked)
    num = asked.get("n", 1)
    for options in ((), ("--num-draft-tokens", 0, "--key", PUBLIC)):
        done = verify(tmp_path / "answer.json", *options)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (0, f"{num} of {num}: the same bits"), done
    stated = [read_receipt(choice["receipt"]) for choice in answer["choices"]]
    assert [each.choice for each in stated] == list(range(num))
    assert {type(each.answer) for each in stated} == {str if "receipt" in asked else tuple}


def test_streams_and_responses_have_receipts_too(client: TestClient, verify: Verify, tmp_path: Path) -> None:
    streamed = events(client.post("/v1/chat/completions", json=CHAT | {"receipt": True, "stream": True, "n": 2}))
    response = client.post("/v1/responses", json={"input": "How many?", "max_output_tokens": 9, "receipt": True})
    (tmp_path / "all.json").write_text(json.dumps([*streamed, response.json()]))
    done = verify(tmp_path / "all.json", "--drafter", "none")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "3 of 3: the same bits"), done


def places(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a response shows a text."""
    within = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, each in within:
        if key in TEXTS and isinstance(each, str) and each:
            yield (*path, key)
        elif key not in ("receipt", "tools"):
            yield from places(each, (*path, key))


@pytest.mark.parametrize("shown", SHOWN)
def test_a_response_that_shows_another_text_than_its_ids_is_found(
    shown: str, models: dict[str, Path], worker: assembly.Worker, omnidraft_home: Path, verify: Verify, tmp_path: Path
) -> None:
    path, (endpoint, body) = tmp_path / "response.json", SHOWN[shown]
    engine = engine_of(models, "thoughts", omnidraft_home) if shown == "thoughts" else worker
    for client in client_of(engine, engine):
        response = client.post(f"/v1/{endpoint}", json=body | {"receipt": "digests", "return_token_ids": True})
        if endpoint == "responses":
            response = client.post(f"/v1/{endpoint}", json=body | {"receipt": True})
        assert response.status_code == 200, response.text
    answer = events(response) if "stream" in body else response.json()
    path.write_text(json.dumps(answer))
    done = verify(path)
    assert (done.returncode, " too; its prompt ends with " in done.stdout) == (0, True), done
    changed = list(places(answer))
    assert changed
    for *above, last in (changed[0], changed[-1], *changed[1:-1:4]):
        copy = json.loads(json.dumps(answer))
        holder = copy
        for key in above:
            holder = holder[key]
        holder[last] = holder[last][:-1] + chr(ord(holder[last][-1]) ^ 1)
        path.write_text(json.dumps(copy))
        done = verify(path)
        num = 1 if above else len(answer.get("choices", "1"))  # all of a response have its model
        assert (done.returncode, f"{num} DIFFERENT" in done.stdout) == (1, True), (above, last, done)
        assert "the response has " in done.stdout


def test_what_was_not_compared_is_said(
    models: dict[str, Path], omnidraft_home: Path, verify: Verify, tmp_path: Path
) -> None:
    engine = engine_of(models, "thoughts", omnidraft_home)
    for client in client_of(engine, engine):
        answer = answered(client, tmp_path / "a.json", **SHOWN["thoughts"][1], include_reasoning=False)
    assert "its thoughts are not shown" in verify(tmp_path / "a.json").stdout
    (tmp_path / "a.json").write_text(json.dumps(answer["choices"][0]["receipt"]))
    alone = verify(tmp_path / "a.json")
    assert (alone.returncode, "no text is beside it to compare, it begins '" in alone.stdout) == (0, True), alone


def test_a_generated_text_has_a_receipt(
    models: dict[str, Path],
    omnidraft_home: Path,
    verify: Verify,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environ = tiny_pair_environ(omnidraft_home, (models["target"], models["drafter"]))
    arguments = ("generate", "--prompt", "How many?", "--max-new-tokens", 12, "--receipt", tmp_path / "receipt.json")
    for mode, secret, words in (("fast", SECRET, "decode.mode"), ("reproducible", None, "worker.receipt_key")):
        key = {} if secret is None else {"OMNIDRAFT_WORKER__RECEIPT_KEY": secret}
        refused = run_cli((*arguments, "--mode", mode), monkeypatch, capsys, environ | key)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused
    key = {"OMNIDRAFT_WORKER__RECEIPT_KEY": SECRET}
    done = run_cli((*arguments, "--mode", "reproducible"), monkeypatch, capsys, environ | key)
    assert done.returncode == 0, done
    verified = verify(tmp_path / "receipt.json", "--drafter", models["drafter"])
    assert (verified.returncode, PUBLIC in verified.stdout) == (0, True), verified


def test_what_has_no_receipt_is_refused_by_the_setting_that_it_lacks(
    client: TestClient, worker: assembly.Worker
) -> None:
    fast = client.post("/v1/chat/completions", json=CHAT | {"receipt": True, "mode": "fast"})
    assert (fast.status_code, "reproducible" in fast.text) == (400, True)
    requests = RequestQueue(CountingMetrics(), max_waiting=8)
    served = [ServedModel(worker.engine, "print")]
    with TestClient(application(requests, served, WorkerSettings(), lambda: b"")) as without:
        refused = without.post("/v1/chat/completions", json=CHAT | {"receipt": True})
    requests.close(PATIENCE_S)
    assert (refused.status_code, "worker.receipt_key" in refused.text) == (400, True)


def test_a_changed_receipt_is_refused(client: TestClient, verify: Verify, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    answer = answered(client, path, n=2)
    envelope = answer["choices"][1]["receipt"]
    payload = payload_of(envelope)
    payload["sampling"]["temperature"] = 0.8
    envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_text(json.dumps(answer))
    done = verify(path)
    assert (done.returncode, "it was changed" in done.stdout) == (1, True), done
    assert done.stdout.splitlines()[-1] == "1 of 2: the same bits; 1 REFUSED"
    stranger = PrivateKey(new_private_key()).public_text("worker")
    done = verify(path, "--key", stranger)
    assert (done.returncode, "not trusted" in done.stdout) == (1, True), done
    assert done.stdout.splitlines()[-1] == "0 of 2: the same bits; 2 REFUSED"
    done = verify(path, "--key", "junk")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"top_k": 2},
        {"repetition_penalty": 1.8},
        {"logit_bias": {"70": 9.0}},
        {"seed": 8},
        {"max_new_tokens": 30},
        {"max_new_tokens": 9},
        {"stop_ids": list(range(400))},
    ],
    ids=str,
)
def test_another_setting_draws_another_text(
    change: dict[str, Any], client: TestClient, verify: Verify, tmp_path: Path
) -> None:
    """Even where the server signs it."""
    answer = answered(client, tmp_path / "answer.json", seed=7, ignore_eos=True)
    payload = payload_of(answer["choices"][0]["receipt"])
    of_sampling = change.keys() <= payload["sampling"].keys()
    changed = payload | ({"sampling": payload["sampling"] | change} if of_sampling else change)
    done = verify(signed(changed, tmp_path / "changed.json"))
    assert (done.returncode, "DIFFERENT at token " in done.stdout) == (1, True), done


def test_another_models_answer_under_its_name_is_found(
    models: dict[str, Path], worker: assembly.Worker, omnidraft_home: Path, verify: Verify, tmp_path: Path
) -> None:
    """By the first token, where the server states the weights falsely; by the weights, where it states them."""
    other = engine_of(models, "other", omnidraft_home)
    for stated, code, words in ((worker, 1, "; 1 DIFFERENT"), (other, 2, "not this model: weights ")):
        for client in client_of(other, stated):
            answered(client, tmp_path / "answer.json", temperature=0)
        done = verify(tmp_path / "answer.json", "--target", models["target"])
        assert (done.returncode, words in done.stdout) == (code, True), done
        assert ("their logits differ by +" in done.stdout) == (code == 1)


def test_one_flipped_bit_of_the_weights_is_another_model(
    models: dict[str, Path], client: TestClient, verify: Verify, tmp_path: Path
) -> None:
    answered(client, tmp_path / "answer.json")
    weights = models["target"] / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-5000] + bytes([whole[-5000] ^ 1]) + whole[-4999:])
    try:
        done = verify(tmp_path / "answer.json")
    finally:
        weights.write_bytes(whole)
    assert (done.returncode, "not this model: weights " in done.stdout) == (2, True), done
    assert verify(tmp_path / "answer.json").returncode == 0


def test_ids_of_another_text_are_not_those_of_a_receipt(client: TestClient, verify: Verify, tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    for receipt in (True, "digests"):
        answer = answered(client, path, receipt=receipt, return_token_ids=True)
        answer["choices"][0]["token_ids"][3] ^= 1
        path.write_text(json.dumps(answer))
        done = verify(path)
        assert (done.returncode, "REFUSED: it is of another answer" in done.stdout) == (1, True), done
    path.write_text(json.dumps(answer["choices"][0]["receipt"]))
    done = verify(path)
    assert (done.returncode, f"{path}: not checked: the receipt has a digest" in done.stdout) == (2, True), done
    assert "return_token_ids" in done.stdout


def test_a_bad_file_is_judged_alone(client: TestClient, verify: Verify, tmp_path: Path) -> None:
    good, junk = tmp_path / "good.json", tmp_path / "junk.json"
    payload = payload_of(answered(client, good, seed=7)["choices"][0]["receipt"])
    junk.write_text('{"choices": [')
    files = [signed(payload | change, tmp_path / f"{number}.json") for number, change in enumerate(IMPOSSIBLE.values())]
    done = verify(*files, junk, tmp_path / "missing.json", good)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done
    _, *lines, last = done.stdout.splitlines()
    assert last == f"1 of {len(files) + 3}: the same bits; {len(files) - 2} REFUSED; 4 not checked"
    for file, words, line in zip(files, IMPOSSIBLE, lines, strict=False):
        verdict = "" if words.startswith("not checked") else "REFUSED: "
        assert line.startswith(f"{file}: {verdict}"), line
        assert words in line
    assert lines[-1].startswith(f"{good}: the same bits, ")


def test_a_verdict_says_of_which_model_and_when_and_each_receipt_is_judged_under_its_own_name(
    models: dict[str, Path], client: TestClient, verify: Verify, tmp_path: Path
) -> None:
    path = tmp_path / "answer.json"
    payload = payload_of(answered(client, path)["choices"][0]["receipt"])
    model, day = payload["model"], datetime.fromtimestamp(payload["time_ms"] / 1000, UTC)
    renamed = signed(payload | {"model": model | {"name": str(models["other"])}}, tmp_path / "renamed.json")
    done = verify(path, renamed, path)
    assert done.returncode == 2, done
    said = f"{model['name']} ({model['kernels']}), signed on {day:%Y-%m-%d %H:%M:%S} UTC by {PUBLIC}"
    _, first, second, third, last = done.stdout.splitlines()
    assert said in first
    assert "How many clips?" in first
    assert first == third
    assert f"{renamed}: not this model: weights " in second
    assert last == "2 of 3: the same bits; 1 not this model"


def test_a_stream_as_it_came_over_the_wire_is_read(client: TestClient, verify: Verify, tmp_path: Path) -> None:
    path = tmp_path / "stream.sse"
    asked = {"input": "How many?", "max_output_tokens": 9, "temperature": 0}
    for endpoint, body in (("chat/completions", CHAT), ("responses", asked)):
        path.write_bytes(client.post(f"/v1/{endpoint}", json=body | {"stream": True, "receipt": True}).content)
        done = verify(path)
        assert (done.returncode, " too; its prompt ends with " in done.stdout) == (0, True), done
    path.write_bytes(path.read_bytes().replace(b'"delta": "', b'"delta": "x', 1))
    done = verify(path)
    assert (done.returncode, " of its stream: the response has " in done.stdout) == (1, True), done


def test_a_choice_that_shows_less_than_its_ids_say_is_no_match(
    client: TestClient, verify: Verify, tmp_path: Path
) -> None:
    path, other = tmp_path / "answer.json", tmp_path / "response.json"
    answer = answered(client, path, n=2)
    answer["choices"][0]["finish_reason"] = None
    del answer["choices"][1]["receipt"]
    path.write_text(json.dumps(answer))
    asked = {"input": "How many?", "max_output_tokens": 9, "temperature": 0, "receipt": True}
    response = client.post("/v1/responses", json=asked)
    other.write_text(json.dumps(response.json() | {"output": []}))
    done = verify(path, other)
    assert done.returncode == 1, done
    _, ended, lacking, empty, last = done.stdout.splitlines()
    assert "[0]: DIFFERENT: the response has ended by None" in ended
    assert lacking == f"{path}[1]: not checked: choice 1 has no receipt"
    assert "DIFFERENT at character 0 of content: the response has its end" in empty
    assert last == "0 of 3: the same bits; 2 DIFFERENT; 1 not checked"
    assert "leave --tenant out" in verify(path, "--tenant", "a").stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from-log", "--tenant", "a"), "--tenant is for documents"),
        (("--from-log", "--key", "k"), "--key is for documents"),
        (("a.json", "--since", "1h"), "--since is for answers of the log"),
        (("a.json", "--sample", 0.5), "--sample is for answers of the log"),
        (("--from-log", "a.avro"), "archive of that is named by --log"),
    ],
    ids=str,
)
def test_an_option_of_the_other_use_is_refused(options: tuple[object, ...], words: str, verify: Verify) -> None:
    done = verify(*options)
    assert (done.returncode, done.stdout, words in done.stderr) == (2, "", True), done


def test_the_log_is_verified_and_a_changed_record_found(
    models: dict[str, Path], omnidraft_home: Path, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path}/log.db"
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))
    settings = tiny_settings(
        (models["target"], models["drafter"]), log={"url": url}, registry={"url": f"directory:///{tmp_path}/registry"}
    )
    worker = assembly.worker(settings, CountingMetrics())
    assert worker.producer is not None
    for client in client_of(worker, worker):
        for number in range(8):
            answered(client, tmp_path / "answer.json", seed=number, presence_penalty=number / 4)
        for more in (
            {"mode": "fast", "receipt": False},
            {"logit_bias": {"65": 1}},
            {"structured_outputs": {"regex": "a+b"}},
        ):
            answered(client, tmp_path / "answer.json", **more)
    worker.producer.close(PATIENCE_S)
    done = verify("--from-log", "--log", url)
    assert done.returncode == 0, done
    last = done.stdout.splitlines()[-1]
    assert last.startswith("8 of 8: the same bits; ")
    assert "2 left out: with a grammar" in last
    assert "1 left out: not in the reproducible mode" in last
    share = verify("--from-log", "--log", url, "--sample", 0.4)
    assert share.returncode == 0
    assert share.stdout.splitlines()[-1].startswith("4 of 4: the same bits; ")

    records = log_slice.read(None, settings, log_slice.SliceFilter()).records
    emitted_ids = records[3].emitted_ids.copy()
    emitted_ids[5] ^= 1
    records[3] = replace(records[3], emitted_ids=emitted_ids)
    records[6] = replace(records[6], temperature=0.1)
    archive.write(tmp_path / "changed.avro", records)
    done = verify("--from-log", "--log", tmp_path / "changed.avro")
    assert done.returncode == 1, done
    assert done.stdout.splitlines()[-1].startswith("6 of 8: the same bits; 2 DIFFERENT")
    assert f"{records[3].request_id}: DIFFERENT at token 5" in done.stdout
