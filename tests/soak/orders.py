"""The time of an operator's orders until every worker follows, while the registry is stopped.

With the registry stopped the snapshot in place serves all requests; once it is back, the next one comes by
itself.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from omnidraft import assembly
from omnidraft.client import COMPLETIONS, OpenAIClient, Reply
from omnidraft.demo.local_cluster import ServiceFailed
from omnidraft.fleet.control_log import ControlLog
from omnidraft.fleet.forget_orders import order_forgetting
from omnidraft.ports import Pause
from omnidraft.progress import bar
from tests.soak import faults
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import REGISTRY, SERVICES, Cluster, empty_folder, tiny_settings
from tests.soak.load_clients import Tally, load
from tests.soak.part import PartResult, SoakPlan

NUM_ORDERS = 10
"""Of each kind."""
CHAMPION_S, FORGET_S = 2.0, 3.0
"""The promises."""
TIMEOUT_S = 240.0
POLL_S = 0.02
SETTLED = 5
"""Looks, a second apart, at which the champion is the same."""
REST_S = 1.0
"""Seconds between two orders, so that followers are idle when one comes."""
TENANT, PROMPT = "leaver", "How many clips did Natalia sell altogether in April and May? " * 8


def run(plan: SoakPlan) -> PartResult:
    """Learn two snapshots, stop the registry, go back and forth between them and forget a tenant, and go on."""
    with Cluster(empty_folder(plan.out / "orders"), tiny_settings(plan.out / "models")) as cluster:
        plain, ended = faults.plain_texts(cluster.settings), list[str]()
        cluster.start_all()
        cluster.on_end = lambda name, returncode, last: ended.append(name)
        clients = load(cluster.url, AckMonitor(cluster.url), num_clients=1, pause_s=0.1, max_tokens=faults.MAX_TOKENS)
        with clients as tally:
            figures = _orders(cluster, tally)
            before = _served(tally)
            cluster.wait_for(lambda: bool(_served(tally) - before), "new champion after the outage", TIMEOUT_S)
        figures |= {
            "answers": len(tally.replies),
            "requests_failed": len(tally.failures),
            "wrong_texts": sum(reply.text != plain[prompt] for prompt, reply in tally.replies),
            "ended_by_themselves": ended,
        }
        for name in reversed(SERVICES):
            cluster.stop(name)
    return PartResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    is_served = figures["answers_while_stopped"] > 0 and figures["requests_failed"] == 0 and figures["wrong_texts"] == 0
    return {
        "with the registry stopped every request is answered": is_served,
        f"a champion is in effect on every worker within {CHAMPION_S:.0f} s": figures["champion_s"][-1] <= CHAMPION_S,
        f"a rollback is in effect on every worker within {CHAMPION_S:.0f} s": figures["rollback_s"][-1] <= CHAMPION_S,
        f"`forget` is in effect on every worker within {FORGET_S:.0f} s": figures["forget_s"][-1] <= FORGET_S,
        "no process ends": figures["ended_by_themselves"] == [],
    }


def _served(tally: Tally) -> set[str]:
    """Return the snapshots of all answers so far."""
    return {reply.snapshot_id for _, reply in list(tally.replies)}


def _orders(cluster: Cluster, tally: Tally) -> dict[str, Any]:
    """Return the seconds of each order, sorted. Learning is paused meanwhile, so that no other champion comes."""
    control, settings = assembly.ordering_log(cluster.settings), cluster.settings

    def has_former() -> bool:
        champion = control.read_whole().champion
        return champion is not None and champion.previous is not None

    cluster.wait_for(has_former, "second champion", TIMEOUT_S)
    control.put(("pause",), Pause())
    champion = _wait_until_settled(cluster, control)
    standing = control.read_whole().champion
    assert standing is not None
    assert standing.previous is not None
    back, forward, forget = list[float](), list[float](), list[float]()
    first = len(tally.replies)
    cluster.pause(REGISTRY)
    with bar("orders", 3 * NUM_ORDERS) as advance:
        for _ in range(NUM_ORDERS):
            for seconds, version in ((back, standing.previous), (forward, champion)):
                order = partial(assembly.order_champion, settings, control, version)
                seconds.append(_seconds_until(cluster, order, lambda url, version=version: _version(url) == version))
                advance()
            for url in cluster.urls.values():
                while not _cached(url):  # it remembers the tenant's prompt
                    time.sleep(POLL_S)
            order = partial(order_forgetting, control, TENANT, 0, {})
            forget.append(_seconds_until(cluster, order, lambda url: not _cached(url)))
            advance()
    num_answers = len(tally.replies) - first
    cluster.resume(REGISTRY)
    control.put(("pause",), None)
    named = {"champion_s": forward, "rollback_s": back, "forget_s": forget}
    figures: dict[str, Any] = {name: [round(each, 3) for each in sorted(seconds)] for name, seconds in named.items()}
    medians = {f"median_{name}": round(median(seconds), 3) for name, seconds in named.items()}
    return figures | medians | {"workers": len(cluster.urls), "answers_while_stopped": num_answers}


def _wait_until_settled(cluster: Cluster, control: ControlLog) -> int:
    """Return the champion once it has served everywhere for a while."""
    served: list[int | None] = []

    def is_settled() -> bool:
        champion = control.read_whole().champion
        now = {_version(url) for url in cluster.urls.values()} | {champion.version if champion else None}
        served.append(now.pop() if len(now) == 1 else None)
        return len(set(served[-SETTLED:])) == 1 and served[-1] is not None and len(served) >= SETTLED

    cluster.wait_for(is_settled, "settled champion", TIMEOUT_S, poll_s=1.0)
    assert served[-1] is not None
    return served[-1]


def _seconds_until(cluster: Cluster, order: Callable[[], object], is_followed: Callable[[str], bool]) -> float:
    """Give the order, and return the seconds until every worker follows it. Raises ServiceFailed."""
    time.sleep(REST_S)
    started, waiting = time.monotonic(), set(cluster.urls.values())
    order()
    while waiting:
        waiting -= {url for url in waiting if is_followed(url)}
        if time.monotonic() - started > TIMEOUT_S:
            raise ServiceFailed(f"an order is not followed everywhere after {TIMEOUT_S:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - started


def _version(url: str) -> int | None:
    """Return the snapshot version that a one-token answer names."""
    version: int | None = _ask(url, prompt="x", figures=True).stats["snapshot_version"]
    return version


def _cached(url: str) -> int:
    """Return how many tokens of the tenant's prompt the worker remembered."""
    cached: int = _ask(url, prompt=PROMPT, user=TENANT).body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def _ask(url: str, **fields: Any) -> Reply:
    body = {"max_tokens": 1, "temperature": 0, "store": False} | fields
    with OpenAIClient(url, timeout_s=TIMEOUT_S) as api:
        return api.ask(COMPLETIONS, body)
