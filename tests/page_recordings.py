"""What the page's stream tells, and recordings as the page saves them."""

import json
from collections.abc import Sequence
from typing import Any

import httpx

from tests.http_server import stream_parts

PASSES = "/page/passes"
LANES = {"plain": "off", "drafted": "auto"}


def body(question: str, *, speculation: str | int = "auto", **fields: Any) -> dict[str, Any]:
    """A question as the page asks it."""
    asked = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 24,
        "seed": 5,
        "temperature": 0,
        "store": False,
    }
    return asked | {"logprobs": True, "top_logprobs": 5, "speculation": speculation} | fields


def told(response: httpx.Response) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = stream_parts(response.text)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in parts]


def passes(events: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [data for name, data in events if name == "pass"]


def end(events: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    name, data = events[-1]
    assert name == "end", data
    return data


def recording(client: httpx.Client, question: str, **fields: Any) -> dict[str, Any]:
    """Both lanes of a question, as the page saves them."""
    asked = {"question": question, "target": "tiny", "drafter": "tiny", "temperature": 0, "seed": 5, "snapshot": None}
    lanes: dict[str, Any] = {"asked": asked}
    for name, speculation in LANES.items():
        events = told(client.post(PASSES, json=body(question, speculation=speculation, **fields)))
        lanes[name] = {"passes": passes(events), "end": end(events)}
    return lanes
