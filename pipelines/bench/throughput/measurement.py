"""What is measured of each system, one system at a time."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omnidraft.client import ApiError
from omnidraft.demo.local_cluster import ServiceFailed
from omnidraft.errors import ModelError
from omnidraft.progress import bar
from pipelines.bench.throughput import latency
from pipelines.bench.throughput.clients import Row, Tally, Workload, chat_body, row, run_clients, user
from pipelines.bench.throughput.systems import Endpoint, ServerSetup, serving

WARM_UP_TOKENS = 16
MIN_REQUESTS = 2
"""Requests of each client at least."""
MIN_SLOT_TOKENS = 2048
MORE_TOKENS = 512
"""What chat template, answers and questions may add to a long prompt."""


@dataclass(frozen=True, slots=True)
class ThroughputPlan:
    """The options of all systems."""

    work: Workload
    clients: Sequence[int]
    num_prompts: int
    max_new_tokens: int
    temperature: float
    long_prompt_tokens: int | None
    second_turn_tokens: int | None

    @property
    def num_slots(self) -> int:
        """The texts that a server has to decode side by side."""
        return max([1, *self.clients, *([latency.NUM_RUNNING + 1] if self.long_prompt_tokens else [])])

    @property
    def slot_tokens(self) -> int:
        """The longest text with its prompt."""
        return max(
            MIN_SLOT_TOKENS, (self.long_prompt_tokens or 0) + MORE_TOKENS, (self.second_turn_tokens or 0) + MORE_TOKENS
        )

    def bodies(self, endpoint: Endpoint, part: str, num: int, max_new_tokens: int) -> list[dict[str, Any]]:
        """Return `num` requests; the same part asks every system the same."""
        return [
            chat_body(endpoint, [user(text)], max_new_tokens, self.temperature, seed)
            for seed, text in enumerate(self.work.prompts(part, num))
        ]


class Measurement:
    """The figures so far."""

    def __init__(self, plan: ThroughputPlan, publish: Callable[[dict[str, Any]], None]) -> None:
        """
        Args:
            publish: called with all figures after each that is new.
        """
        self._plan, self._publish = plan, publish
        self.rows: list[Row] = []
        self._long_prompt: dict[str, latency.Figures] = {}
        self._second_turn: dict[str, latency.Figures] = {}

    @property
    def figures(self) -> dict[str, Any]:
        """The fields of the report."""
        return {"rows": self.rows, "long_prompt": self._long_prompt, "second_turn": self._second_turn}

    def measure(self, name: str, setup: ServerSetup) -> None:
        """Start the system's server, measure everything of the plan, and stop it; a failure is rows with its reason."""
        print(f"{name}: starting", file=sys.stderr)
        try:
            with serving(name, setup) as endpoint:
                self.measure_endpoint(name, endpoint)
        except (ServiceFailed, ModelError, OSError) as exc:
            print(f"{name}: {exc}", file=sys.stderr)
            measured = {each["clients"] for each in self.rows if each["system"] == name}
            for num_clients in self._plan.clients:
                if num_clients not in measured:
                    self._add_row(name, num_clients, None, Tally(errors=[str(exc).strip()]))

    def measure_endpoint(self, name: str, endpoint: Endpoint) -> None:
        """Measure everything of the plan on a server that is ready."""
        for num_clients in self._plan.clients:
            self._add_row(name, num_clients, endpoint.weights, self._many_clients(name, num_clients, endpoint))
        self._measure_latency(name, endpoint)

    def _many_clients(self, name: str, num_clients: int, endpoint: Endpoint) -> Tally:
        """Warm up with as many clients, then measure."""
        plan, part = self._plan, f"{num_clients} clients"
        warm_up = plan.bodies(endpoint, f"warming up {part}", num_clients, WARM_UP_TOKENS)
        num = max(plan.num_prompts, MIN_REQUESTS * num_clients)
        with bar(f"{name}, {part}", num) as advance:
            run_clients(endpoint.url, warm_up, num_clients, lambda: None)
            bodies = plan.bodies(endpoint, part, num, plan.max_new_tokens)
            return run_clients(endpoint.url, bodies, num_clients, advance)

    def _add_row(self, name: str, num_clients: int, weights: str | None, tally: Tally) -> None:
        self.rows.append({"weights": weights} | row(name, num_clients, tally, self._plan.work.count_tokens))
        self._publish(self.figures)

    def _measure_latency(self, name: str, endpoint: Endpoint) -> None:
        plan = self._plan
        if (num_tokens := plan.long_prompt_tokens) is not None:
            with bar(f"{name}, long prompt", 1) as advance:
                self._long_prompt[name] = _figures(
                    lambda: latency.long_prompt(endpoint, plan.work, num_tokens, plan.temperature)
                )
                advance()
            self._publish(self.figures)
        if (history := plan.second_turn_tokens) is not None:
            with bar(f"{name}, second turns", latency.NUM_REQUESTS) as advance:
                self._second_turn[name] = _figures(
                    lambda: latency.second_turn(endpoint, plan.work, history, plan.temperature, advance)
                )
            self._publish(self.figures)


def _figures(measure: Callable[[], latency.Figures]) -> latency.Figures:
    """Return what was measured, or the reason why not."""
    try:
        return measure()
    except ApiError as exc:
        return {"error": str(exc)}
