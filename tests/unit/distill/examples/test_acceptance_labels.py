"""Labels against the definitions: every chance by the target's own table, shaped the slow way."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.distill.examples.acceptance_labels import NodeLabels, node_labels, target_distribution
from omnidraft.ports import NO_OTHERS, Grammar, OtherTexts, Proposer, Request, Sampling, TextOutcome
from omnidraft.testing.toy_models import ToyTable
from omnidraft.traces.record import SOURCES, TargetLogprobs, TraceRecord
from tests.trace_records import make_record
from tests.unit.decode.toys import (
    ALIGNMENT,
    DRAFT_PIECES,
    TABLE,
    TARGET_EOS,
    TARGET_PIECES,
    D,
    T,
    Wide,
    make_cache,
    make_drafter,
    make_request,
    slow_shape,
    table_of,
    toy_decoder,
)

V = len(TARGET_PIECES)
FIRST_T = ALIGNMENT.draft_first_T
ENDS = frozenset({TARGET_EOS})
UNRESHAPED = {
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"has_logit_bias": False, "has_grammar": False},
}
SHAPES = [
    *(Sampling(1.0), Sampling(0.8, top_k=7, top_p=0.8), Sampling(1.3, min_p=0.2)),
]


def trace(request: Request, proposer: Proposer, num_kept: int = V) -> TraceRecord:
    """The request's only record, decoded for real."""
    records: list[TraceRecord] = []
    origin = RecordContext("r", "t", "w", "target", "drafter", 1, ALIGNMENT.fingerprint)
    tracer = TraceRecordBuilder(request, origin, records.append)
    for step in toy_decoder(trace_top_k=num_kept).decode(request, proposer):
        tracer.take(step)
    (record,) = records
    return record


def tree_proposer(seed: int = 3) -> Proposer:
    """Trees with runners-up, splits and merges."""
    cache = make_cache()
    for pieces in ((b"h", b"e"), (b"a", b"b"), (b"c", b"d"), (b" ", b"a"), (b"g", b"h")):
        cache.insert(tuple(D[piece] for piece in pieces), T[b"".join(pieces)])
    table = ToyTable.random(len(DRAFT_PIECES), seed=seed)

    class Policy(Wide):
        def update(self, outcomes: Sequence[TextOutcome], others: OtherTexts = NO_OTHERS) -> None:
            self.num_asked = 0

    return make_drafter(table, cache=cache, policy=Policy(4, 3, 5), has_lookup=True)


def texts_of(record: TraceRecord, labels: NodeLabels) -> Iterator[tuple[int, list[int]]]:
    """Each labelled node with the target's text before it."""
    prompt, emitted = record.prompt_ids.tolist(), record.emitted_ids.tolist()
    for node, position in zip(labels.node_L, labels.emitted_L, strict=True):
        yield int(node), [*prompt, *emitted[:position]]


def expected_label(record: TraceRecord, node: int, text: list[int], sampling: Sampling) -> float:
    token = int(record.rounds.node_ids_M[node])
    p = slow_shape(TABLE.logits(text).tolist(), sampling)
    is_direct = SOURCES[record.rounds.sources_M[node]] == "direct"
    return sum(x for v, x in p.items() if v == token or (is_direct and FIRST_T[v] == FIRST_T[token]))


@pytest.mark.parametrize("sampling", SHAPES, ids=str)
def test_a_soft_label_is_the_targets_chance_by_its_own_table(sampling) -> None:
    seen = set()
    for seed in range(4):
        request = make_request(sampling, seed=seed, num_draft_tokens=12, max_new_tokens=40)
        record = trace(request, tree_proposer())
        labels = node_labels(record, FIRST_T)
        for (node, text), label in zip(texts_of(record, labels), labels.soft_L, strict=True):
            assert label == pytest.approx(expected_label(record, node, text, sampling), abs=6e-3)  # float16 in records
            seen.add(SOURCES[record.rounds.sources_M[node]])
    assert seen == {"direct", "split", "merge", "lookup"}


def test_exactly_the_nodes_behind_the_path_are_labelled() -> None:
    """By definition, nodes with a drawn parent, before the end of the text."""
    record = trace(make_request(num_draft_tokens=12, max_new_tokens=60, seed=5), tree_proposer())
    rounds, expected = record.rounds, {}
    node, emitted = 0, 0
    for number, num_emitted in zip(rounds.num_nodes_R, rounds.num_emitted_R, strict=True):
        depth = {0: 0}
        for index in range(1, int(number) + 1):
            parent = int(rounds.parents_M[node + index - 1])
            if parent in depth and depth[parent] < num_emitted:
                expected[node + index - 1] = emitted + depth[parent]
            if parent in depth and rounds.accepted_M[node + index - 1]:
                depth[index] = depth[parent] + 1
        node, emitted = node + int(number), emitted + int(num_emitted)
    labels = node_labels(record, FIRST_T)
    assert dict(zip(labels.node_L.tolist(), labels.emitted_L.tolist(), strict=True)) == expected
    assert len(expected) < len(rounds.node_ids_M)


def test_an_accepted_node_is_right_and_at_temperature_0_that_is_its_label() -> None:
    record = trace(make_request(Sampling(0.0), num_draft_tokens=12, max_new_tokens=60), tree_proposer())
    labels = node_labels(record, FIRST_T)
    assert np.array_equal(labels.soft_L, labels.right_L)
    is_accepted_L = record.rounds.accepted_M[labels.node_L] == 1
    assert labels.right_L[is_accepted_L].all()
    assert np.flatnonzero(record.rounds.accepted_M).tolist() == labels.node_L[is_accepted_L].tolist()
    for node, label in zip(labels.node_L[~is_accepted_L], labels.right_L[~is_accepted_L], strict=True):
        assert not label or SOURCES[record.rounds.sources_M[node]] == "direct"


def test_drafting_without_a_look_at_the_noise_is_right_as_often_as_the_soft_labels_say() -> None:
    """About 1,200 drafted tokens: the mean of their labels is off by 0.014 on average, by 0.07 once in a million."""
    soft, right = [], []
    for seed in range(18):
        record = trace(make_request(seed=seed, num_draft_tokens=6, max_new_tokens=60), make_drafter())
        labels = node_labels(record, FIRST_T)
        soft.append(labels.soft_L)
        right.append(labels.right_L)
    assert len(np.concatenate(soft)) > 600
    assert np.concatenate(soft).mean() == pytest.approx(np.concatenate(right).mean(), abs=0.07)


def test_with_the_noise_in_view_drafted_tokens_are_right_more_often_than_soft_labels_say() -> None:
    """Which is why a deployment that looks at it learns from what was drawn."""
    request = make_request(num_draft_tokens=6, max_new_tokens=240)
    labels = node_labels(trace(request, make_drafter(noise_weight=1.0)), FIRST_T)
    assert labels.right_L.mean() > labels.soft_L.mean() + 0.05


def test_the_labels_of_a_splits_pieces_multiply_to_the_chance_of_all_of_it() -> None:
    """Draft token abcd is abc, d for the target. Enumerated over all texts of two target tokens."""
    assert ALIGNMENT.pieces(D[b"abcd"]) == (T[b"abc"], T[b"d"])
    table, requests = table_of(len(DRAFT_PIECES), {}, D[b"abcd"]), (make_request(seed=seed) for seed in range(400))
    record = next(
        record for request in requests if (record := trace(request, make_drafter(table))).rounds.accepted_M[0]
    )
    text, sampling = record.prompt_ids.tolist(), Sampling(1.0)
    enumerated = {
        (one, other): x * y
        for one, x in slow_shape(TABLE.logits(text).tolist(), sampling).items()
        for other, y in slow_shape(TABLE.logits([*text, one]).tolist(), sampling).items()
    }
    assert sum(enumerated.values()) == pytest.approx(1)
    labels = node_labels(record, FIRST_T)
    assert labels.node_L[:2].tolist() == [0, 1]
    assert float(labels.soft_L[0] * labels.soft_L[1]) == pytest.approx(enumerated[T[b"abc"], T[b"d"]], abs=1e-4)


def test_going_on_from_a_token_is_right_when_it_begins_the_merge_that_is_drawn() -> None:
    """h is drafted as one token, and the target may say he, which the drafter begins with h too."""
    logprobs = make_logprobs({T[b"h"]: 0.5, T[b"he"]: 0.3, T[b"a"]: 0.2})
    record = one_round(T[b"h"], "direct", emitted=T[b"he"], logprobs=logprobs)
    labels = node_labels(record, FIRST_T)
    assert labels.soft_L == pytest.approx([0.8], abs=1e-3)
    assert labels.right_L.tolist() == [1.0]
    merge = node_labels(one_round(T[b"he"], "merge", emitted=T[b"h"], logprobs=logprobs), FIRST_T)
    assert merge.soft_L == pytest.approx([0.3], abs=1e-3)
    assert merge.right_L.tolist() == [0.0]


def test_a_token_outside_the_top_k_has_at_most_the_mass_left_for_it() -> None:
    logprobs = make_logprobs({T[b"a"]: 0.9, T[b"g"]: 0.02}, tail=0.08)
    (label,) = node_labels(one_round(T[b"f"], "direct", emitted=T[b"a"], logprobs=logprobs), FIRST_T).soft_L
    assert label == pytest.approx(0.02, abs=1e-3)
    thin = make_logprobs({T[b"a"]: 0.9, T[b"g"]: 0.09}, tail=0.01)
    (label,) = node_labels(one_round(T[b"f"], "direct", emitted=T[b"a"], logprobs=thin), FIRST_T).soft_L
    assert label == pytest.approx(0.01, abs=1e-3)


def test_without_log_probabilities_the_label_is_whether_the_token_was_drawn() -> None:
    record = trace(make_request(seed=2, max_new_tokens=40), make_drafter())
    labels = node_labels(replace(record, beliefs=None), FIRST_T)
    assert np.array_equal(labels.soft_L, node_labels(record, FIRST_T).right_L)


RESHAPED = [
    *(Sampling(1.0, repetition_penalty=1.5), Sampling(1.0, presence_penalty=1.0)),
    *(Sampling(1.0, frequency_penalty=0.5), Sampling(1.0, logit_bias={T[b"a"]: 3.0})),
    Sampling(1.0, grammar=Grammar("regex", "[a-h ]*")),
]


@pytest.mark.parametrize("sampling", RESHAPED, ids=str)
def test_where_no_record_has_the_distribution_the_label_is_whether_the_token_was_drawn(sampling) -> None:
    request = make_request(sampling, seed=4, num_draft_tokens=12, max_new_tokens=40, stop_ids=ENDS)
    record = trace(request, tree_proposer())
    labels = node_labels(record, FIRST_T)
    assert len(labels.node_L)
    assert np.array_equal(labels.soft_L, labels.right_L)
    assert not np.array_equal(node_labels(replace(record, **UNRESHAPED), FIRST_T).soft_L, labels.soft_L)


@pytest.mark.parametrize("num_kept", [4, 16])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.0), Sampling(1.0, top_k=3), Sampling(1.0, top_p=0.3), Sampling(1.0, min_p=0.9)],
    ids=str,
)
def test_the_top_k_give_the_distribution_of_all_tokens_at_temperature_1(num_kept, sampling) -> None:
    record = trace(make_request(sampling, max_new_tokens=30), make_drafter(), num_kept)
    assert record.beliefs is not None
    shaped = target_distribution(record.beliefs, sampling)
    for position, row in enumerate(shaped.x_EK):
        text = [*record.prompt_ids.tolist(), *record.emitted_ids.tolist()[:position]]
        p = slow_shape(TABLE.logits(text).tolist(), sampling)
        expected = [p.get(int(token), 0.0) for token in shaped.ids_EK[position]]
        assert row == pytest.approx(expected, abs=6e-3)
        outside = [x for token, x in p.items() if token not in shaped.ids_EK[position]]
        assert max(outside, default=0.0) <= shaped.other_E[position] + 6e-3


def make_logprobs(p: dict[int, float], tail: float = 0.0) -> TargetLogprobs:
    """At the only position of `one_round`."""
    with np.errstate(divide="ignore"):
        log_p_1K, log_tail_1 = np.log([list(p.values())]), np.log([tail])
    return TargetLogprobs(
        np.array([list(p)], np.uint32),
        log_p_1K.astype(np.float16),
        log_p_1K[:, 0].astype(np.float16),
        log_tail_1.astype(np.float16),
    )


def one_round(token: int, source: str, *, emitted: int, logprobs: TargetLogprobs) -> TraceRecord:
    """One drafted node and one emitted token, at temperature 1."""
    record = make_record(num_emitted=1, temperature=1.0, top_p=None, beliefs=logprobs)
    rounds = replace(
        record.rounds,
        num_nodes_R=np.array([1], np.uint16),
        num_accepted_R=np.array([token == emitted], np.uint16),
        node_ids_M=np.array([token], np.uint32),
        parents_M=np.zeros(1, np.uint16),
        sources_M=np.array([SOURCES.index(source)], np.uint8),
        log_q_M=np.zeros(1, np.float16),
        accepted_M=np.array([token == emitted], np.uint8),
    )
    return replace(record, emitted_ids=np.array([emitted], np.uint32), rounds=rounds)
