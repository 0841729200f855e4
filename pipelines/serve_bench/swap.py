"""A snapshot taken up under load: how long the tokens of running streams wait for each other, around it and usually.

Each snapshot is fetched, checked, loaded and swapped by the serving process while streams run in it.
"""

import http.client
import json
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
from omnidraft.fleet import announcements
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.snapshots import bundle
from pipelines.lib.check_result import CheckResult
from pipelines.lib.local_cluster import ServiceFailed
from pipelines.lib.progress import bar
from pipelines.lib.report import ms
from pipelines.serve_bench.server import ServeBenchPlan, Server, serving

DELAY_MS = 50.0
NUM_CLIENTS = 4
REST_S = 4.0
"""Before each swap: usual times come from here."""
AFTER_S = 1.0
"""A swap may still be felt so long after it was seen."""
LOOK_S = 0.5
"""Between two looks at the server's metrics, which hold up a pass by some milliseconds."""
TAKE_UP_TIMEOUT_S = 120.0
NOISE = 1e-3
"""Of each weight, as a share of it."""


@dataclass(slots=True)
class Gaps:
    """Between two events of a stream: (when the later one came, seconds since the one before)."""

    gaps: list[tuple[float, float]] = field(default_factory=list)
    fingerprints: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)


def run(plan: ServeBenchPlan) -> CheckResult:
    """Streams without end, and as many swaps as the plan says."""
    more = "[recorder]\nenabled = true"
    with serving(plan, "swap", more) as server:
        versions = _publish(server.settings, server.folder, plan.swaps)
        seen, stop = Gaps(), threading.Event()
        threads = [
            threading.Thread(target=_stream_on, args=(server.url, plan.tokens, number, seen, stop))
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
    figures = figures_of(seen, windows)
    return CheckResult(figures, promises(figures))


def promises(figures: dict[str, Any]) -> dict[str, bool]:
    """From the figures of this part."""
    return {
        f"a swap under load delays no token by more than {DELAY_MS:g} ms beyond its usual time": (
            figures["longest_delay_ms"] <= DELAY_MS
        ),
        "no stream ends with an error around a swap": not figures["errors"],
        "answers name the new snapshots": figures["snapshots_in_answers"] >= 2,
    }


def _swap_all(server: Server, versions: Sequence[int]) -> list[tuple[float, float]]:
    """From each announcement to a while after its snapshot was in place."""
    settings = server.settings
    registry, writer = wiring.registry(settings), wiring.log_writer(settings, settings.log.control_topic)
    models, windows = settings.models, []
    with bar("swaps", len(versions)) as advance:
        for version in versions:
            time.sleep(REST_S)
            started = time.monotonic()
            registry.promote(version)
            announcements.publish_announcement(
                writer, "champion", version, target=models.target, drafter=models.drafter
            )
            while _in_place(server.url) != version:
                if time.monotonic() - started > TAKE_UP_TIMEOUT_S:
                    raise ServiceFailed(f"version {version} was not taken up within {TAKE_UP_TIMEOUT_S:.0f} s")
                time.sleep(LOOK_S)
            time.sleep(AFTER_S)
            windows.append((started, time.monotonic()))
            advance()
    return windows


def _in_place(url: str) -> int | None:
    """The version that the server says it serves."""
    for line in httpx.get(f"{url}/metrics", timeout=TAKE_UP_TIMEOUT_S).text.splitlines():
        if line.startswith("omnidraft_snapshot_version_info{"):
            return int(float(line.rpartition(" ")[2]))
    return None


def _publish(settings: Settings, folder: Path, num: int) -> list[int]:
    """So many versions with all weights and an n-gram cache."""
    words = wiring.vocabularies(settings)
    identity, registry = wiring.identity(settings, words), wiring.registry(settings)
    tensors = load_trainable(words.drafter_folder, train="full", rank=1, seed=0).serving_tensors()
    ngrams = wiring.ngram_cache(settings, words, None).to_arrays()
    versions: list[int] = []
    parent_id: str | None = None
    for number in range(num):
        generator = torch.Generator().manual_seed(number)
        shaken = {name: _shaken(tensor, generator) for name, tensor in tensors.items()}
        manifest = identity.manifest(parent_id, train="full")
        made = folder / f"made-{number}"
        bundle.write(made, manifest, {bundle.DRAFTER: shaken, bundle.NGRAMS: ngrams})
        published = registry.publish(made, versions[-1] if versions else None)
        versions.append(published.version)
        parent_id = manifest.snapshot_id
    return versions


def _shaken(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return tensor * (1 + NOISE * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)


def _stream_on(url: str, tokens: int, number: int, seen: Gaps, stop: threading.Event) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    seed = number * 1000
    while not stop.is_set():
        seed += 1
        body = {"prompt": f"Numbers: {seed}", "max_tokens": tokens, "temperature": 1, "seed": seed, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        _read(connection.getresponse(), seen)


def _read(response: http.client.HTTPResponse, seen: Gaps) -> None:
    if response.status != 200:
        seen.errors.append(f"status {response.status}: {response.read()[:200]!r}")
        return
    before: float | None = None
    for line in response:
        now = time.monotonic()
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            seen.errors.append(event["error"]["message"])
            continue
        if before is None:
            seen.fingerprints.add(event["system_fingerprint"])
        else:
            seen.gaps.append((now, now - before))
        before = now


def figures_of(seen: Gaps, windows: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Tokens around the windows against all others; for the report."""
    around: list[float] = []
    usual: list[float] = []
    for at, gap in seen.gaps:
        (around if any(start <= at <= end for start, end in windows) else usual).append(gap)
    return {
        "swaps": len(windows),
        "snapshots_in_answers": len(seen.fingerprints),
        "swap_s": [round(end - start - AFTER_S, 3) for start, end in windows],
        "usual": _spread(usual),
        "around_swaps": _spread(around),
        "longest_delay_ms": ms(max(around, default=0.0) - median(usual)),
        "longest_usual_delay_ms": ms(max(usual, default=0.0) - median(usual)),
        "errors": seen.errors[:20],
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
