"""Decoding speed while the log is away: the same prompts decoded with the broker up and down, in turns.

Windows alternate: up, stopped (SIGSTOP: connections stay open without answers), up, killed (SIGKILL), up, so that a
machine that slows down or speeds up meanwhile shows in both. One engine and one trace producer run throughout.
"""

import time
from collections.abc import Sequence
from contextlib import closing
from statistics import median
from typing import Any

import torch

from omnidraft import assembly, prompts
from omnidraft.config import Settings
from omnidraft.decode.engine import Engine
from omnidraft.decode.generation import GenerationRequest
from omnidraft.decode.recording import trace_producer
from omnidraft.demo.recorded import QUESTIONS
from omnidraft.distill.ingest import topic_scan
from omnidraft.ports import Sampling
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from tests.soak.cluster import BROKER, Cluster, empty_folder, tiny_settings
from tests.soak.part import PartResult, SoakPlan

NUM_PROMPTS = 3
MAX_TOKENS = 48
WINDOWS = ("up", "stopped", "up", "killed", "up")
UP_SHARE = 0.5
"""The length of a window with the broker up, as a share of an outage: there are more of them."""
QUEUE_RECORDS = 4
"""A queue so short that an outage fills it: records after that are dropped, and must be counted."""
MAX_SLOWDOWN = 0.02
RECOVERY_TIMEOUT_S = 60.0

Window = tuple[str, list[float]]
"""Its kind, and the tokens a second of each prompt."""


def run(plan: SoakPlan) -> PartResult:
    """Measure speeds and drops; check that every record ended as acknowledged or as dropped."""
    with Cluster(empty_folder(plan.out / "broker-down"), _toml(plan)) as cluster:
        cluster.bring_up(BROKER)
        settings, metrics = _settings(cluster.settings, plan), CountingMetrics()
        torch.set_num_threads(plan.threads)
        worker = assembly.worker(settings, metrics)
        assert worker.producer is not None
        windows, recovered_s = _windows(cluster, worker.engine, metrics, plan.outage_s)
        num_given_up = worker.producer.close(RECOVERY_TIMEOUT_S)
        figures = _figures(windows) | {
            "recovered_s": [round(seconds, 1) for seconds in recovered_s],
            "emitted": int(metrics.value(trace_producer.EMITTED)),
            "acknowledged": int(metrics.value(trace_producer.ACKNOWLEDGED)),
            "dropped": int(metrics.value(trace_producer.DROPPED)),
            "given_up_at_the_end": num_given_up,
            "records_in_log": _num_in_log(settings),
            "outage_s": plan.outage_s,
            "target": plan.target,
            "drafter": plan.drafter,
        }
    return PartResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    accounted = figures["acknowledged"] + figures["dropped"] == figures["emitted"]
    return {
        f"with the broker down decoding keeps {1 - MAX_SLOWDOWN:.0%} of its speed": figures["speed_ratio"]
        >= 1 - MAX_SLOWDOWN,
        "what the queue cannot hold is dropped and counted, all else is acknowledged": accounted
        and figures["dropped"] > 0
        and figures["records_in_log"] >= figures["acknowledged"],
        "sending goes on without a restart": len(figures["recovered_s"]) == len(WINDOWS) - WINDOWS.count("up")
        and figures["given_up_at_the_end"] == 0,
    }


def _toml(plan: SoakPlan) -> str:
    if plan.target == "tiny":
        return tiny_settings(plan.out / "models")
    return f'[models]\ntarget = "{plan.target}"\ndrafter = "{plan.drafter}"\n[worker]'


def _settings(settings: Settings, plan: SoakPlan) -> Settings:
    """Work that depends on nothing measured, a small queue, and no champion to be taken up meanwhile."""
    decode = settings.decode.model_copy(update={"policy": "fixed", "num_draft_tokens": 4, "threads": plan.threads})
    return settings.model_copy(
        update={
            "decode": decode,
            "recorder": settings.recorder.model_copy(update={"queue_records": QUEUE_RECORDS}),
            "registry": settings.registry.model_copy(update={"url": f"directory:///{plan.out}/broker-down/registry"}),
        }
    )


def _windows(
    cluster: Cluster, engine: Engine, metrics: CountingMetrics, outage_s: float
) -> tuple[list[Window], list[float]]:
    """Return the windows in the order of WINDOWS, and how long each recovery took."""
    texts = [prompt.text for prompt in prompts.read(QUESTIONS, NUM_PROMPTS)]
    for text in texts:
        _tokens_per_s(engine, text)
    windows: list[Window] = []
    recovered_s: list[float] = []
    with bar("windows with the broker up and down", len(WINDOWS)) as advance:
        for kind in WINDOWS:
            match kind:
                case "stopped":
                    cluster.pause(BROKER)
                case "killed":
                    cluster.kill(BROKER)
            windows.append((kind, _window(engine, texts, outage_s * (UP_SHARE if kind == "up" else 1))))
            if kind != "up":
                recovered_s.append(_bring_back(cluster, kind, metrics))
            advance()
    return windows, recovered_s


def _bring_back(cluster: Cluster, kind: str, metrics: CountingMetrics) -> float:
    """Start the broker again and return the seconds until records are acknowledged."""
    before = metrics.value(trace_producer.ACKNOWLEDGED)
    cluster.resume(BROKER) if kind == "stopped" else cluster.bring_up(BROKER)
    started = time.monotonic()
    cluster.wait_for(
        lambda: metrics.value(trace_producer.ACKNOWLEDGED) > before, "record acknowledged again", RECOVERY_TIMEOUT_S
    )
    return time.monotonic() - started


def _window(engine: Engine, texts: Sequence[str], seconds: float) -> list[float]:
    """Decode the prompts in whole rounds for at least `seconds`; return the median speed of each."""
    speeds: list[list[float]] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        speeds.append([_tokens_per_s(engine, text) for text in texts])
    return [median(of_prompt) for of_prompt in zip(*speeds, strict=True)]


def _tokens_per_s(engine: Engine, text: str) -> float:
    request = GenerationRequest(
        messages=[{"role": "user", "content": text}], max_new_tokens=MAX_TOKENS, sampling=Sampling(0.0), seed=0
    )
    started = time.perf_counter()
    num_tokens = sum(len(step.emitted) for step in engine.stream(request).steps)
    return num_tokens / (time.perf_counter() - started)


def _figures(windows: Sequence[Window]) -> dict[str, Any]:
    """Return each prompt's speed in a kind of window, against its speed with the broker up."""
    typical = {
        kind: [median(of_prompt) for of_prompt in zip(*(each for name, each in windows if name == kind), strict=True)]
        for kind in dict.fromkeys(WINDOWS)
    }
    ratios = {
        kind: median(speed / up for speed, up in zip(speeds, typical["up"], strict=True))
        for kind, speeds in typical.items()
    }
    return {
        "tokens_per_s": {kind: round(median(speeds), 2) for kind, speeds in typical.items()},
        "windows": [{"kind": kind, "tokens_per_s": round(median(speeds), 2)} for kind, speeds in windows],
        "ratios": {kind: round(ratio, 4) for kind, ratio in ratios.items()},
        "speed_ratio": round(min(ratios.values()), 4),
    }


def _num_in_log(settings: Settings) -> int:
    with closing(assembly.log_reader(settings, settings.log.traces_topic)) as reader:
        return sum(1 for _ in topic_scan.messages(reader))
