"""What the steps of a text add to the metrics, as they come.

A position counts as scored when something had been drafted there, and as agreed when the first-ranked candidate was the
token that the target drew; its source and depth are those of that candidate. decode/figures.py counts the same.
"""

import time
from collections.abc import Generator, Iterator
from functools import partial

from omnidraft.ports import DraftTree, Metrics, Step

_DRAFTED = "omnidraft_spec_decode_num_"


class StepMetrics:
    """Of one text."""

    def __init__(self, metrics: Metrics, *, target: str, drafter_version: str, plain_pass_s: float | None) -> None:
        """`plain_pass_s` is what a pass without a draft takes here; None: nobody measured it."""
        self._add = partial(metrics.add, target=target, drafter_version=drafter_version)
        self._observe = partial(metrics.observe, target=target)
        self._observe_version = partial(metrics.observe, target=target, drafter_version=drafter_version)
        self._plain_pass_s = plain_pass_s

    def over(self, steps: Iterator[Step]) -> Generator[Step, None, None]:
        """The steps, counted."""
        last_s: float | None = None
        for step in steps:
            self._count(step)
            now_s = time.perf_counter()
            if last_s is not None and step.emitted:
                for _ in step.emitted:
                    self._observe("omnidraft_inter_token_latency_seconds", (now_s - last_s) / len(step.emitted))
            last_s = now_s
            yield step

    def _count(self, step: Step) -> None:
        self._add("omnidraft_target_passes_total")
        self._add("omnidraft_emitted_tokens_total", len(step.emitted))
        self._observe_version("omnidraft_spec_decode_accepted_tokens_per_pass", len(step.path))
        self._count_seconds(step)
        self._count_sources(step)
        self._count_positions(step)

    def _count_seconds(self, step: Step) -> None:
        spent = step.timings
        for part, seconds in (("draft", spent.draft_s), ("target", spent.target_s), ("other", spent.other_s)):
            self._add("omnidraft_decode_seconds_total", seconds, part=part)
        if self._plain_pass_s is not None:
            self._add("omnidraft_plain_decode_seconds_total", self._plain_pass_s * len(step.emitted))

    def _count_sources(self, step: Step) -> None:
        for source in sorted({source for source in step.tree.sources if source}):
            nodes = [node for node in range(1, len(step.tree)) if step.tree.sources[node] == source]
            accepted = [node for node in step.path if step.tree.sources[node] == source]
            self._add(_DRAFTED + "drafts_total", source=source)
            self._add(_DRAFTED + "draft_tokens_total", len(nodes), source=source)
            self._add(_DRAFTED + "accepted_tokens_total", len(accepted), source=source)

    def _count_positions(self, step: Step) -> None:
        for depth, node in enumerate(step.path):
            source = str(step.tree.sources[node])
            self._add(_DRAFTED + "accepted_tokens_per_pos_total", source=source, position=str(depth))
        for depth, (node, drawn) in enumerate(zip((0, *step.path), (*step.path, None), strict=True)):
            first = _first_ranked(step.tree, node)
            if first is None or depth == len(step.emitted):  # nothing drafted there, or nothing drawn: the text ended
                continue
            source, position = str(step.tree.sources[first]), str(depth)
            self._add("omnidraft_scored_positions_total", source=source, position=position)
            if drawn == first:
                self._add("omnidraft_agreed_positions_total", source=source, position=position)


def _first_ranked(tree: DraftTree, node: int) -> int | None:
    """The best candidate behind a node: siblings stand in the order of their rank."""
    return next((child for child in range(node + 1, len(tree)) if tree.parents[child] == node), None)
