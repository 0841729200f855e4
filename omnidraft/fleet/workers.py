"""The status of decoding workers: which announced themselves on the control log, and what each says of itself over
HTTP: liveness, readiness, and statistics of each target it serves."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from omnidraft.ports import WORKER_NEWS_S, ControlState, Entry, WorkerNews

OWNER = "omnidraft"
"""`owned_by` in a worker's list of models; other servers have another one."""

SILENT_S, GONE_S = 3 * WORKER_NEWS_S, 3600.0
"""The age of a worker's news from which it counts as gone without saying so, and that from which nobody misses it."""

_Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class ServedTargetStatus:
    """Statistics of one target since the worker started."""

    target: str
    version: int | None
    """The snapshot that serves; None: the base drafter, or a folder."""
    num_requests: int
    num_failed: int
    """Requests with another status than `ok`, those of clients that disconnected included."""
    agreement: float | None
    """The mean over its requests; None when nothing was drafted."""
    tokens_per_pass: float | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status of one worker; complete when `problem` is None."""

    url: str
    problem: str | None = None
    is_alive: bool = False
    is_ready: bool = False
    served: tuple[ServedTargetStatus, ...] = ()


def announced(states: Iterable[ControlState], now_ms: int) -> dict[str, Entry]:
    """Return the newest news of each worker, by name."""
    entries = [each for state in states for each in state.entries.values() if isinstance(each.value, WorkerNews)]
    newest = {each.key[1]: each for each in sorted(entries, key=lambda each: each.key)}
    return {name: each for name, each in newest.items() if now_ms - each.at_ms < 1000 * GONE_S}


def told_status(name: str, entry: Entry, ask: Callable[[str], WorkerStatus], now_ms: int) -> WorkerStatus:
    """Return the status of a worker that announced itself: from itself, where it has an address."""
    news, age_s = entry.value, (now_ms - entry.at_ms) / 1000
    assert isinstance(news, WorkerNews)
    if age_s > SILENT_S:
        return WorkerStatus(news.address or name, f"was last heard of {age_s:.0f} s ago")
    if news.address is not None:
        return ask(news.address)
    served = (ServedTargetStatus(target, version, 0, 0, None, None) for target, version in news.serves.items())
    return WorkerStatus(name, None, is_alive=True, is_ready=True, served=tuple(served))


def laggards(workers: Sequence[WorkerStatus], states: Mapping[str, ControlState]) -> Iterator[str]:
    """Yield a line for each worker that does not serve the champion."""
    champions = {target: state.champion.version for target, state in states.items() if state.champion is not None}
    for worker in workers:
        for each in worker.served:
            champion = champions.get(each.target, each.version)
            if each.version != champion:
                serves = "the base drafter" if each.version is None else f"snapshot {each.version}"
                yield f"worker {worker.url}: serves {serves} of {each.target}, the champion is {champion}"


def worker_status(url: str, timeout_s: float = 3.0, *, metrics_key: SecretStr | None = None) -> WorkerStatus:
    """Fetch the status of the worker at this URL. Never raises: no answer, or another server, is a `problem`.

    Args:
        metrics_key: sent with the request for /metrics alone.
    """
    headers = {} if metrics_key is None else {"Authorization": f"Bearer {metrics_key.get_secret_value()}"}
    try:
        with httpx.Client(base_url=url, timeout=timeout_s) as client:
            return _fetch(url, client, headers)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return WorkerStatus(url, f"does not answer: {exc or type(exc).__name__}")
    except (ValueError, KeyError, TypeError) as exc:  # JSON or metrics of something else
        return WorkerStatus(url, f"is no omnidraft worker: {type(exc).__name__}: {exc}")


def _fetch(url: str, client: httpx.Client, metrics_headers: Mapping[str, str]) -> WorkerStatus:
    models, metrics = client.get("/v1/models"), client.get("/metrics", headers=metrics_headers)
    if metrics.status_code == 401:
        return WorkerStatus(url, "shows its metrics to holders of their key only; set worker.metrics_key here too")
    samples = _samples(metrics.text) if metrics.status_code == 200 else {}
    targets = _targets(models, samples)
    if not targets:
        return WorkerStatus(url, f"is no omnidraft worker: /v1/models gave {models.status_code}")
    metrics.raise_for_status()
    alive, ready = client.get("/healthz"), client.get("/readyz")
    problem = next((f"{each.url.path}: {_status(each)}" for each in (alive, ready) if each.status_code != 200), None)
    return WorkerStatus(
        url,
        problem,
        is_alive=alive.status_code == 200,
        is_ready=ready.status_code == 200,
        served=tuple(_served(target, samples) for target in targets),
    )


def _targets(models: httpx.Response, samples: _Samples) -> tuple[str, ...]:
    """Return the targets of a worker, none for another server. A worker with API keys lists models only to their
    holders, but its metrics name the targets, so no key is sent to a server that might be another."""
    if models.status_code == 401:
        return tuple(dict.fromkeys(labels["target"] for labels, _ in samples.get("omnidraft_requests_total", ())))
    if models.status_code != 200 or any(each["owned_by"] != OWNER for each in models.json()["data"]):
        return ()
    return tuple(each["id"] for each in models.json()["data"])


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text.strip()[:200]}"


def _samples(text: str) -> _Samples:
    """Parse metrics: sample name -> (labels, value) of each child."""
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    return samples


def _served(target: str, samples: _Samples) -> ServedTargetStatus:
    def values(name: str, **labels: str) -> list[float]:
        required = {"target": target, **labels}.items()
        return [value for its, value in samples.get(name, ()) if required <= its.items()]

    versions = values("omnidraft_snapshot_version_info")
    num_requests = sum(values("omnidraft_requests_total"))
    return ServedTargetStatus(
        target=target,
        version=int(versions[0]) if versions else None,
        num_requests=int(num_requests),
        num_failed=int(num_requests - sum(values("omnidraft_requests_total", status="ok"))),
        agreement=_ratio(values("omnidraft_agreement_ratio_sum"), values("omnidraft_agreement_ratio_count")),
        tokens_per_pass=_ratio(values("omnidraft_emitted_tokens_total"), values("omnidraft_target_passes_total")),
    )


def _ratio(amounts: Iterable[float], times: Iterable[float]) -> float | None:
    total = sum(times)
    return sum(amounts) / total if total else None
