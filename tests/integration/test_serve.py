"""`omnidraft serve` as people start it, from two names: a process, asked by the clients that people have."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from omnidraft import assembly
from omnidraft.decode.generation import GenerationRequest
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.ports import Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.tiny_models import make_drafter, make_target
from tests.tiny_engine import PATIENCE_S, tiny_settings

KEY = "sk-for-this-test-0123"
NUM_CLIENTS, NUM_TOKENS = 64, 12
START_TIMEOUT_S = 120.0
NO_END = {"0": -100, "1": -100, "2": -100}
"""A bias against all that ends a text."""
CODE = "import sys; from omnidraft.cli import main; sys.argv[0] = 'omnidraft'; main()"

pytestmark = pytest.mark.timeout(300)


@dataclass
class Started:
    """A server process and how to reach it."""

    process: subprocess.Popen[bytes]
    url: str
    models: tuple[Path, Path]
    log: Path

    @property
    def name(self) -> str:
        return str(self.models[0])

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {KEY}"}

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def wild_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With texts that differ from seed to seed."""
    root = tmp_path_factory.mktemp("wild")
    return make_target(root / "target", spread=0.3), make_drafter(root / "drafter")


@pytest.fixture(scope="module")
def started(
    wild_models: tuple[Path, Path], omnidraft_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """In a folder of its own, with nothing but two names, a port and a key; and in float32, to be compared."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target, drafter = map(str, wild_models)
    keys = json.dumps([{"key": KEY, "tenant": "tests"}])
    environ = os.environ | {"OMNIDRAFT_HOME": str(omnidraft_home), "OMNIDRAFT_WORKER__API_KEYS": keys}
    environ |= {"OMNIDRAFT_MODELS__PRECISION": "float32", "OMNIDRAFT_MODELS__DRAFTER_PRECISION": "float32"}
    environ |= {"OMNIDRAFT_DECODE__THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", CODE, "serve", "--target", target, "--drafter", drafter, "--port", str(port)]
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder, env=environ, stderr=file)
    made = Started(process, f"http://127.0.0.1:{port}", wild_models, log)
    try:
        wait_until_ready(made)
        yield made
    finally:
        process.kill()
        process.wait()


def wait_until_ready(started: Started) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while status(started, "/readyz") != 200:
        assert started.process.poll() is None, started.log.read_text()
        assert time.monotonic() < deadline, started.log.read_text()
        time.sleep(0.1)


def status(started: Started, path: str) -> int | None:
    try:
        return httpx.get(f"{started.url}{path}", timeout=5.0).status_code
    except httpx.TransportError:
        return None


def test_the_text_at_temperature_0_is_that_of_plain_transformers(started: Started) -> None:
    """`generate` of the same folder, in the same precision, on the same ids."""
    tokenizer = load_tokenizer(started.models[0])
    model = AutoModelForCausalLM.from_pretrained(started.models[0], dtype=torch.float32)
    messages = [{"role": "user", "content": "How many clips did Natalia sell?"}]

    def generated(ids: list[int]) -> str:
        prompt = torch.tensor([ids])
        stops = sorted(tokenizer.stop_ids)
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=48, do_sample=False, eos_token_id=stops
        )
        said = [token for token in made[0, len(ids) :].tolist() if token not in stops]
        return tokenizer.vocabulary.spell(said).decode(errors="replace")

    with started.client() as client:
        for prompt in ("A robe takes 2 bolts", "Numbers: 0 1 2", "Answer with"):
            answer = client.completions.create(model=started.name, prompt=prompt, max_tokens=48, temperature=0)
            assert answer.choices[0].text == generated(tokenizer.prompt_ids(prompt)) != ""
        chat = client.chat.completions.create(
            model=started.name, messages=messages, max_completion_tokens=48, temperature=0
        )
        assert chat.choices[0].message.content == generated(tokenizer.chat_prompt_ids(messages))


def test_64_clients_at_once_get_the_texts_that_they_get_alone(
    started: Started, omnidraft_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of them streamed; each seed's text is the library's, by plain decoding."""
    monkeypatch.setenv("OMNIDRAFT_HOME", str(omnidraft_home))

    async def ask(client: openai.AsyncOpenAI, seed: int) -> str:
        asked = {"model": started.name, "prompt": "A robe takes", "max_tokens": NUM_TOKENS, "seed": seed}
        asked["extra_body"] = {"mode": "reproducible"}
        if seed % 2:
            return "".join(
                [part.choices[0].text async for part in await client.completions.create(**asked, stream=True)]
            )
        return (await client.completions.create(**asked)).choices[0].text

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{started.url}/v1", api_key=KEY, max_retries=0) as client:
            return await asyncio.gather(*[ask(client, seed) for seed in range(NUM_CLIENTS)])

    texts = asyncio.run(ask_all())
    engine = assembly.engine(tiny_settings(started.models), CountingMetrics()).engine
    plain = GenerationRequest(
        prompt="A robe takes", max_new_tokens=NUM_TOKENS, sampling=Sampling(1.0), num_draft_tokens=0
    )
    for seed, text in enumerate(texts):
        assert text == "".join(step.text for step in engine.stream(replace(plain, seed=seed)).steps)
    assert len(set(texts)) > NUM_CLIENTS / 2


def test_it_needs_nothing_beside_it_and_shows_no_key(started: Started) -> None:
    files = {path.name for path in (started.log.parent / "runs" / "omnidraft").iterdir()}
    assert {"log.db", "mlflow.db"} <= files
    log = started.log.read_text()
    assert f"serving {started.name} on {started.url}" in log
    assert KEY not in log
    assert "Traceback" not in log


def test_sigterm_refuses_the_new_and_finishes_what_was_accepted(started: Started) -> None:
    """The last test of this process."""
    body = {"prompt": "x", "max_tokens": 600, "logit_bias": NO_END, "stream": True}
    answers: list[str] = []
    has_begun = threading.Event()

    def read() -> None:
        with httpx.stream(
            "POST", f"{started.url}/v1/completions", json=body, headers=started.headers, timeout=60.0
        ) as response:
            for line in response.iter_lines():
                answers.append(line)
                has_begun.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert has_begun.wait(PATIENCE_S)
    started.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + PATIENCE_S
    while status(started, "/readyz") != 503:
        assert time.monotonic() < deadline
    assert status(started, "/healthz") == 200
    late = httpx.post(f"{started.url}/v1/completions", json={"prompt": "x"}, headers=started.headers)
    assert (late.status_code, late.headers["retry-after"]) == (503, "1")
    assert late.json()["error"]["code"] == "stopping"
    reader.join(PATIENCE_S * 2)
    assert answers[-2] == "data: [DONE]"
    last = [line for line in answers if line.startswith("data: {")][-1]
    assert json.loads(last[6:])["choices"][0]["finish_reason"] == "length"
    assert started.process.wait(PATIENCE_S) == 0
