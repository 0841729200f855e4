"""The registry dies under requests: the snapshot in place goes on serving, and the next one comes by itself."""

import time
from typing import Any

from omnidraft import assembly
from omnidraft.progress import bar
from tests.soak import kills
from tests.soak.acknowledged import AckMonitor
from tests.soak.cluster import REGISTRY, SERVICES, Cluster, empty_folder, tiny_settings
from tests.soak.load_clients import Tally, load
from tests.soak.part import PartResult, SoakPlan

PAUSE_S = 0.1
SHARE = 0.5
"""The length of the outage as a share of the plan's, which is the broker's."""
TIMEOUT_S = 240.0


def run(plan: SoakPlan) -> PartResult:
    """Kill the registry, wait, and start it again; the worker is never restarted."""
    with Cluster(empty_folder(plan.out / "registry-down"), tiny_settings(plan.out / "models")) as cluster:
        plain = kills.plain_texts(cluster.settings)
        cluster.start_all()
        ended: list[str] = []
        cluster.on_end = ended.append
        acks = AckMonitor(cluster.url)
        clients = load(cluster.url, acks, num_clients=2, pause_s=PAUSE_S, max_tokens=kills.MAX_TOKENS)
        with clients as tally:
            figures = _outage(cluster, tally, plan.outage_s * SHARE)
        figures |= {
            "answers": len(tally.replies),
            "requests_failed": len(tally.failures),
            "wrong_texts": sum(reply.text != plain[prompt] for prompt, reply in tally.replies),
            "worker_restarts": ended.count("decode_worker"),
            "ended_by_themselves": ended,
        }
        for name in reversed(SERVICES):
            cluster.stop(name)
    return PartResult(figures, assertions(figures))


def assertions(figures: dict[str, Any]) -> dict[str, bool]:
    """Check the figures of this part."""
    is_served = figures["answers_while_down"] > 0 and figures["requests_failed"] == 0 and figures["wrong_texts"] == 0
    return {
        "with the registry down every request is answered, by the snapshot in place": is_served
        and figures["snapshots_served_while_down"] == 1,
        "after it is back a new champion is taken up without a restart": figures["taken_up"]
        and figures["worker_restarts"] == 0,
    }


def _outage(cluster: Cluster, tally: Tally, outage_s: float) -> dict[str, Any]:
    cluster.wait_for(lambda: _num_served(tally) >= 2, "second snapshot served", TIMEOUT_S)
    cluster.kill(REGISTRY)
    time.sleep(2.0)  # what was being fetched when it died may still be swapped in
    first = len(tally.replies)
    with bar("registry down", round(outage_s)) as advance:
        for _ in range(round(outage_s)):
            cluster.supervise(1.0)
            advance()
    last = len(tally.replies)
    while_down = [reply.snapshot_id for _, reply in tally.replies[first:last]]
    before = {reply.snapshot_id for _, reply in tally.replies[:last]}
    cluster.bring_up(REGISTRY)
    started = time.monotonic()
    cluster.wait_until_ready(REGISTRY)
    ready_s = time.monotonic() - started

    def is_taken_up() -> bool:
        return any(reply.snapshot_id not in before for _, reply in tally.replies[last:])

    cluster.wait_for(is_taken_up, "new champion after the outage", TIMEOUT_S)
    return {
        "outage_s": outage_s,
        "answers_while_down": len(while_down),
        "snapshots_served_while_down": len(set(while_down)),
        "registry_ready_s": round(ready_s, 1),
        "taken_up": is_taken_up(),
        "taken_up_s": round(time.monotonic() - started, 1),
        "champion_after": assembly.registry(cluster.settings).resolve("champion").version,
    }


def _num_served(tally: Tally) -> int:
    return len({reply.snapshot_id for _, reply in list(tally.replies)})
