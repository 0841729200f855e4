"""Agreement is one number, whether a tree, the metrics, the stats of a text or its trace records say it."""

import random
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.decode.step_telemetry import StepCounter
from omnidraft.fleet.request_stats import request_stats
from omnidraft.ports import DraftTree, FinishReason, Request, Source, Step, Timings
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces.record import TraceRecord

LABELS = {"target": "big", "drafter_version": "3"}


def count(metrics: CountingMetrics, steps: Iterable[Step], plain_token_s: float | None = None) -> list[Step]:
    """Count these steps and return them."""
    counter, counted = StepCounter(metrics, **LABELS, plain_token_s=lambda: plain_token_s), []
    for each in steps:
        counter.take(each)
        counted.append(each)
    return counted


def step(tree: DraftTree, path: tuple[int, ...], *, ends: bool = False) -> Step:
    """Return a step along the path; a text that continues has one token more."""
    emitted = tuple(tree.tokens[node] for node in path) + (() if ends else (999,))
    return Step(tree, emitted, path, "", FinishReason.STOP if ends else None, Timings(0.01, 0.02, 0.003), None)


def random_steps(seed: int) -> Iterator[Step]:
    """Trees of up to 12 nodes, and a path from the root."""
    drawn = random.Random(seed)
    for _ in range(50):
        num_nodes = drawn.randrange(13)
        parents = (0, *(drawn.randrange(node) for node in range(1, num_nodes + 1)))
        sources = (None, *(drawn.choice(list(Source)) for _ in range(num_nodes)))
        tree = DraftTree(tuple(range(num_nodes + 1)), parents, sources, (0.0,) * (num_nodes + 1))
        path: list[int] = []
        while children := [node for node in range(1, len(tree)) if parents[node] == (path or [0])[-1]]:
            if drawn.random() < 0.3:
                break
            path.append(drawn.choice(children))
        yield step(tree, tuple(path), ends=bool(path) and drawn.random() < 0.1)


def scored_by_definition(step: Step) -> list[tuple[int, bool]]:
    """Follow the emitted tokens from the root: the first child of each node, and whether it is the next token."""
    scored, node, tree = [], 0, step.tree
    for token in step.emitted:
        children = [child for child in range(1, len(tree)) if tree.parents[child] == node]
        if not children:
            break
        scored.append((children[0], tree.tokens[children[0]] == token))
        node = next((child for child in children if tree.tokens[child] == token), len(tree))
    return scored


def test_a_position_is_scored_when_a_token_was_drafted_and_one_was_drawn() -> None:
    branchy = DraftTree((9, 1, 2, 3), (0, 0, 0, 2), (None, *[Source.DIRECT] * 3), (0.0,) * 4)
    assert branchy.scored_positions((), 1) == [(1, False)]
    assert branchy.scored_positions((1,), 2) == [(1, True)]  # no token was drafted after it
    assert branchy.scored_positions((2,), 2) == [(1, False), (3, False)]
    assert branchy.scored_positions((2, 3), 3) == [(1, False), (3, True)]
    assert branchy.scored_positions((2,), 1) == [(1, False)]  # the text ended there
    assert DraftTree.empty(9).scored_positions((), 1) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_record_of_the_same_steps_agrees_at_the_first_position_of_each_pass(seed: int) -> None:
    steps, metrics, records = list(random_steps(seed)), CountingMetrics(), list[TraceRecord]()
    count(metrics, steps)
    context = RecordContext("request", "tenant", "worker", "target", "drafter", 3, "aligned")
    builder = TraceRecordBuilder(Request((1,), (1,), 1), context, records.append, segment_tokens=20)
    for each in steps:
        builder.take(each)
    builder.flush(None)
    scored = [each.tree.scored_positions(each.path, len(each.emitted)) for each in steps]
    assert scored == [scored_by_definition(each) for each in steps]
    first_agreed = [each[0][1] for each in scored if each]
    assert 0 < sum(first_agreed) < len(first_agreed)
    assert len(records) > 1
    assert np.concatenate([record.rounds.first_agreed for record in records]).tolist() == first_agreed
    stats = [request_stats(record) for record in records]
    assert sum(each.num_drafted for each in stats) == metrics.value("omnidraft_scored_positions_total", position="0")
    assert sum(each.num_agreed for each in stats) == metrics.value("omnidraft_agreed_positions_total", position="0")


@pytest.mark.parametrize("seed", range(2))
def test_metrics_and_stats_of_the_same_steps_agree_with_the_definition(seed: int) -> None:
    metrics, stats, scored = CountingMetrics(), DecodeStats(), list[tuple[int, bool]]()
    for each in count(metrics, random_steps(seed), 0.05):
        stats.take(each)
        scored += scored_by_definition(each)
    assert (stats.num_scored, stats.num_agreed) == (len(scored), sum(agreed for _, agreed in scored))
    assert stats.agreement == stats.summary()["agreement"] == stats.num_agreed / stats.num_scored
    assert metrics.value("omnidraft_target_passes_total", **LABELS) == stats.num_passes == 50
    assert metrics.value("omnidraft_emitted_tokens_total", **LABELS) == stats.num_tokens
    assert metrics.value("omnidraft_scored_positions_total", **LABELS) == stats.num_scored
    assert metrics.value("omnidraft_agreed_positions_total", **LABELS) == stats.num_agreed
    for depth, scored in stats.scored_by_depth.items():
        assert metrics.value("omnidraft_scored_positions_total", position=str(depth - 1)) == scored
    for source, accepted in stats.accepted_by_source.items():
        assert metrics.value("omnidraft_spec_decode_num_accepted_tokens_total", source=source) == accepted
    assert metrics.value("omnidraft_plain_decode_seconds_total") == pytest.approx(0.05 * stats.num_tokens)
    spent = {part: metrics.value("omnidraft_decode_seconds_total", part=part) for part in ("draft", "target", "other")}
    assert spent == pytest.approx({"draft": 0.5, "target": 1.0, "other": 0.15})
    lengths = metrics.observed("omnidraft_spec_decode_accepted_tokens_per_pass", **LABELS)
    assert sum(lengths) == sum(stats.accepted_by_source.values())


def test_the_tokens_of_a_pass_share_its_time() -> None:
    metrics = CountingMetrics()
    chain = DraftTree.chain(0, [1, 2], [Source.DIRECT] * 2, [0.0] * 2)
    steps = [step(chain, ()), step(chain, (1, 2)), step(chain, (1,), ends=True)]
    count(metrics, steps)
    gaps = metrics.observed("omnidraft_inter_token_latency_seconds", target="big")
    assert len(gaps) == 3 + 1
    assert gaps[0] == gaps[1] == gaps[2]
    assert metrics.value("omnidraft_plain_decode_seconds_total") == 0
