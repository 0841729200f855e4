"""What a decoding worker says of itself over HTTP: is it alive, is it ready, what does it serve and how well."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

OWNER = "omnidraft"
"""`owned_by` in a worker's list of models; another server says something else."""

_Samples = Mapping[str, list[tuple[Mapping[str, str], float]]]


@dataclass(frozen=True, slots=True)
class ServedTargetStatus:
    """One target of a worker, since the worker started."""

    target: str
    version: int | None
    """Snapshot in place; None: the base drafter, or a folder."""
    num_requests: int
    num_failed: int
    """Those that did not end well; clients that went away are counted here too."""
    agreement: float | None
    """Mean over its requests; None when nothing was drafted."""
    tokens_per_pass: float | None


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. Without a problem all of it was told."""

    url: str
    problem: str | None = None
    is_alive: bool = False
    is_ready: bool = False
    served: tuple[ServedTargetStatus, ...] = ()


def worker_status(url: str, timeout_s: float = 3.0) -> WorkerStatus:
    """Never raises: a worker that does not answer, or is none, is told as such."""
    try:
        with httpx.Client(base_url=url, timeout=timeout_s) as client:
            return _figures(url, client)
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        return WorkerStatus(url, f"does not answer: {exc or type(exc).__name__}")
    except (ValueError, KeyError, TypeError) as exc:  # JSON or metrics of something else
        return WorkerStatus(url, f"is no omnidraft worker: {type(exc).__name__}: {exc}")


def _figures(url: str, client: httpx.Client) -> WorkerStatus:
    models, metrics = client.get("/v1/models"), client.get("/metrics")
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
    """What a worker serves; none of another server. One with API keys shows its list to their holders only: its metrics
    name its targets to everybody, so no key is sent to a server that might be another."""
    if models.status_code == 401:
        return tuple(dict.fromkeys(labels["target"] for labels, _ in samples.get("omnidraft_requests_total", ())))
    if models.status_code != 200 or any(each["owned_by"] != OWNER for each in models.json()["data"]):
        return ()
    return tuple(each["id"] for each in models.json()["data"])


def _status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text.strip()[:200]}"


def _samples(text: str) -> _Samples:
    """Sample name -> (labels, value) of each child."""
    found: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def _served(target: str, samples: _Samples) -> ServedTargetStatus:
    def values(name: str, **labels: str) -> list[float]:
        wanted = {"target": target, **labels}.items()
        return [value for its, value in samples.get(name, ()) if wanted <= its.items()]

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
