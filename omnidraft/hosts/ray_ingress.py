"""The ingress deployment of a fleet on Ray Serve: routes by `model`, and retries when a replica dies.

Serve's proxy routes by URL prefix only, and once a replica has accepted a request Serve never retries it: when the
replica dies, its own ingress answers 500 or cuts the stream off (Ray 2.60). Here a request that a replica had accepted
is retried on another one as long as its client has read nothing, or pings alone; a stream in progress ends with the
error event of its API. Requests wait here for a free replica, so a waiting one cannot be lost with a replica.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omnidraft.allowed_hosts import MISDIRECTED, is_allowed
from omnidraft.config import WorkerSettings
from omnidraft.decode.sampling.input_limits import BODY_LIMITS
from omnidraft.errors import RequestError
from omnidraft.hosts.asgi_bridge import HttpCall
from omnidraft.hosts.ray_forwarding import ForwardedCall, ReplicasDied
from omnidraft.serving.auth import METRICS_REFUSAL, OwnKey, unauthorized
from omnidraft.serving.error_handlers import error_response
from omnidraft.serving.response_schemas import error
from omnidraft.telemetry.exposition import merge_scrapes

logger = logging.getLogger(__name__)


BROADCAST_TIMEOUT_S = 2.0
"""The time for all replicas to answer a broadcast."""
RETRY_AFTER_S = "5"
MODELS_PATH = "/v1/models"
OPERATOR_PATHS = ("/metrics", "/replicas")
NOT_FORWARDED = (b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"host")
"""Hop-by-hop headers and `host`, which are not forwarded."""


class Ingress:
    """Forwards requests by the model in their body or path. One without a model, or with an unknown one, goes to the
    first target's replicas, which answer or refuse it."""

    def __init__(self, settings: WorkerSettings, replicas: Mapping[str, DeploymentHandle]) -> None:
        """
        Args:
            replicas: target -> handle of its deployment; the first is the default.
        """
        self._metrics_key = OwnKey(settings.metrics_key)
        self._max_body_bytes = settings.max_body_bytes
        self._allowed_hosts = settings.allowed_hosts
        self._replicas = replicas
        self._ready: set[str] = set()

    async def __call__(self, request: Request) -> Response:
        path = request.url.path
        if not is_allowed(request.headers.get("host"), self._allowed_hosts):
            return error_response(path, 421, error(MISDIRECTED, "invalid_request_error"))
        if path in OPERATOR_PATHS and not self._metrics_key.admits(request.headers.get("authorization", "")):
            return unauthorized(METRICS_REFUSAL)
        match path:
            case "/healthz" | "/health":
                return JSONResponse({"status": "ok"})
            case "/readyz":
                return await self._readiness()
            case "/replicas":
                return JSONResponse([asdict(each) for each in await self._broadcast("facts")])
            case "/metrics":
                scrapes = [(worker, text.decode()) for worker, text in await self._broadcast("metrics_text")]
                return Response(merge_scrapes("worker", scrapes), media_type="text/plain; version=0.0.4")
        call = await self._read_call(request)
        if call is None:
            what = f"the body may have {self._max_body_bytes} bytes at most"
            return error_response(path, 413, error(what, "invalid_request_error"))
        try:
            BODY_LIMITS.check(call.body, "body")
        except RequestError as exc:
            return error_response(path, 400, error(str(exc), "invalid_request_error"))
        if call.path == MODELS_PATH:
            return await self._models(call)
        return await self._forward(self._replicas[self._target_of(call)], call)

    async def _read_call(self, request: Request) -> HttpCall | None:
        """Read the whole request; None when its body is too large."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > self._max_body_bytes:
                return None
        headers = tuple((name, value) for name, value in request.headers.raw if name.lower() not in NOT_FORWARDED)
        path, query = request.url.path, request.url.query.encode()
        client = None if request.client is None else (request.client.host, request.client.port)
        return HttpCall(request.method, path, headers, bytes(body), query, client)

    def _target_of(self, call: HttpCall) -> str:
        name = _model_of(call)
        return next(iter(self._replicas)) if name is None or name not in self._replicas else name

    async def _forward(self, replicas: DeploymentHandle, call: HttpCall) -> Response:
        try:
            return await ForwardedCall(replicas, call).response()
        except BackPressureError as exc:
            headers = {"Retry-After": RETRY_AFTER_S}
            return error_response(call.path, 429, error(str(exc), "rate_limit_error"), headers)
        except (ReplicasDied, DeploymentUnavailableError) as exc:
            return error_response(call.path, 503, error(str(exc), "server_error"))

    async def _models(self, call: HttpCall) -> Response:
        """Merge the model lists of all targets; a refusal is returned unchanged."""
        known: list[Any] = []
        for replicas in self._replicas.values():
            answer = await self._forward(replicas, call)
            if answer.status_code != 200:
                return answer
            known += json.loads(bytes(answer.body))["data"]
        return JSONResponse({"object": "list", "data": known})

    async def _readiness(self) -> Response:
        """Return 200 when every target has a replica that answers, else 503."""
        for target, replicas in self._replicas.items():
            try:
                is_ready = bool(await _broadcast_to(replicas, "facts"))
            except DeploymentUnavailableError:
                is_ready = False
            except TimeoutError:  # a hanging replica says nothing about the others: keep the last state
                continue
            (self._ready.add if is_ready else self._ready.discard)(target)
        missing = ", ".join(target for target in self._replicas if target not in self._ready)
        if missing:
            return JSONResponse({"status": f"no replica of {missing}"}, status_code=503)
        return JSONResponse({"status": "ok"})

    async def _broadcast(self, method: str) -> list[Any]:
        """Call a method on all replicas; targets with a replica that does not answer in time are left out."""
        request = (_broadcast_to(replicas, method) for replicas in self._replicas.values())
        answers = await asyncio.gather(*request, return_exceptions=True)
        return [each for replies in answers if not isinstance(replies, BaseException) for each in replies]


def _model_of(call: HttpCall) -> str | None:
    """Return the model that a request names, in its path or its body; None for none."""
    if call.path.startswith(f"{MODELS_PATH}/"):
        return call.path.removeprefix(f"{MODELS_PATH}/")
    try:
        request = json.loads(call.body)
    except ValueError:
        return None
    name = request.get("model") if isinstance(request, dict) else None
    return name if isinstance(name, str) else None


async def _broadcast_to(replicas: DeploymentHandle, method: str) -> list[Any]:
    """Return the results of the replicas that have not died. Raises DeploymentUnavailableError, TimeoutError."""
    answers = await replicas.broadcast(method).results_async(timeout_s=BROADCAST_TIMEOUT_S, return_exceptions=True)
    return [answer for answer in answers if not isinstance(answer, BaseException)]
