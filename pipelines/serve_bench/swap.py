"""A snapshot swapped in under load: the gaps between the tokens of running streams, around the swap and usually.

Each snapshot is fetched, checked, loaded and swapped by the serving process while streams run in it.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import torch

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.demo.local_cluster import ServiceFailed
from omnidraft.demo.openai_client import COMPLETIONS, ApiError, OpenAIClient
from omnidraft.fleet import control_log
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.progress import bar
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import digest
from pipelines.lib.check_result import CheckResult
from pipelines.lib.report import ms
from pipelines.serve_bench.server import ServeBenchPlan, Server, serving

DELAY_MS = 50.0
NUM_CLIENTS = 4
REST_S = 4.0
"""Seconds before each swap; the usual gaps are measured in them."""
AFTER_S = 1.0
"""Seconds after a swap was seen in which its effect is still counted."""
SCRAPE_EVERY_S = 0.5
"""Seconds between two scrapes of the server's metrics; a scrape delays a pass by some milliseconds."""
TAKE_UP_TIMEOUT_S = 120.0
RETRY_S = 0.1
NOISE = 1e-3
"""The standard deviation of the noise on each weight, as a share of it."""


@dataclass(slots=True)
class StreamGaps:
    """The gaps between the events of all streams."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    """(time of the later event, seconds since the one before)"""
    fingerprints: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def run(plan: ServeBenchPlan) -> CheckResult:
    """Swap snapshots as often as the plan says while clients stream without end."""
    with serving(plan, "swap", "[recorder]\nenabled = true") as server:
        versions = _publish(server.settings, server.folder, plan.swaps)
        gaps, stop = StreamGaps(), threading.Event()
        threads = [
            threading.Thread(target=_send_streams, args=(server.url, plan.tokens, number, gaps, stop))
            for number in range(NUM_CLIENTS)
        ]
        for thread in threads:
            thread.start()
        try:
            windows = _swap_all(server, versions)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    figures = figures_of(gaps, windows)
    return CheckResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    return {
        f"a swap under load delays no token by more than {DELAY_MS:g} ms beyond its usual time": (
            figures["longest_delay_ms"] <= DELAY_MS
        ),
        "no stream ends with an error around a swap": not figures["errors"],
        "answers name the new snapshots": figures["snapshots_in_answers"] >= 2,
    }


def _swap_all(server: Server, versions: Sequence[int]) -> list[tuple[float, float]]:
    """Swap in every version; return for each the times of its announcement and of AFTER_S after it was in place."""
    settings = server.settings
    registry, writer = wiring.registry(settings), wiring.control_writer(settings)
    models, windows = settings.models, []
    with bar("swaps", len(versions)) as advance:
        for version in versions:
            time.sleep(REST_S)
            started = time.monotonic()
            registry.promote(version)
            control_log.LogAnnouncer(writer, models.target, models.drafter).publish(
                "champion", version, digest=digest(registry.resolve(str(version)).manifest)
            )
            while _in_place(server.url) != version:
                if time.monotonic() - started > TAKE_UP_TIMEOUT_S:
                    raise ServiceFailed(f"version {version} was not taken up within {TAKE_UP_TIMEOUT_S:.0f} s")
                time.sleep(SCRAPE_EVERY_S)
            time.sleep(AFTER_S)
            windows.append((started, time.monotonic()))
            advance()
    return windows


def _in_place(url: str) -> int | None:
    """Return the version that the server's metrics name."""
    for line in httpx.get(f"{url}/metrics", timeout=TAKE_UP_TIMEOUT_S).text.splitlines():
        if line.startswith("omnidraft_snapshot_version_info{"):
            return int(float(line.rpartition(" ")[2]))
    return None


def _publish(settings: Settings, folder: Path, num: int) -> list[int]:
    """Publish `num` versions of the base drafter, each with a little noise on all weights, and an n-gram cache."""
    tokenizers = wiring.vocabularies(settings)
    identity, registry = wiring.identity(settings, tokenizers), wiring.registry(settings)
    tensors = load_trainable(tokenizers.drafter_folder, train="full", rank=1, seed=0).serving_tensors()
    ngrams = wiring.ngram_cache(settings, tokenizers, None).to_arrays()
    versions: list[int] = []
    parent_id: str | None = None
    for number in range(num):
        generator = torch.Generator().manual_seed(number)
        noisy = {name: _with_noise(tensor, generator) for name, tensor in tensors.items()}
        manifest = identity.manifest(parent_id, train="full")
        source = folder / f"made-{number}"
        bundle.write(source, manifest, {bundle.DRAFTER: noisy, bundle.NGRAMS: ngrams})
        published = registry.publish(source, versions[-1] if versions else None)
        versions.append(published.version)
        parent_id = manifest.snapshot_id
    return versions


def _with_noise(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def _send_streams(url: str, tokens: int, number: int, gaps: StreamGaps, stop: threading.Event) -> None:
    """Request one stream after another and note the gaps between its events."""
    seed = number * 1000
    with OpenAIClient(url, timeout_s=120) as api:
        while not stop.is_set():
            seed += 1
            body = {"prompt": f"Numbers: {seed}", "max_tokens": tokens, "temperature": 1, "seed": seed}
            before: float | None = None
            try:
                for event in api.stream(COMPLETIONS, body):
                    now = time.monotonic()
                    if before is None:
                        gaps.fingerprints.add(event["system_fingerprint"])
                    else:
                        gaps.gaps.append((now, now - before))
                    before = now
            except ApiError as exc:
                gaps.errors.append(str(exc))
                stop.wait(RETRY_S)


def figures_of(gaps: StreamGaps, windows: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return the figures of the report: gaps within the windows against all others."""
    around: list[float] = []
    usual: list[float] = []
    for at, gap in gaps.gaps:
        (around if any(start <= at <= end for start, end in windows) else usual).append(gap)
    return {
        "swaps": len(windows),
        "snapshots_in_answers": len(gaps.fingerprints),
        "swap_s": [round(end - start - AFTER_S, 3) for start, end in windows],
        "usual": _spread(usual),
        "around_swaps": _spread(around),
        "longest_delay_ms": ms(max(around, default=0.0) - median(usual)),
        "longest_usual_delay_ms": ms(max(usual, default=0.0) - median(usual)),
        "errors": gaps.errors[:20],
    }


def _spread(gaps: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(gaps, n=1000)
    return {
        "events": len(gaps),
        "median_ms": ms(median(gaps)),
        "p99_ms": ms(cuts[989]),
        "p999_ms": ms(cuts[998]),
        "longest_ms": ms(max(gaps)),
    }
