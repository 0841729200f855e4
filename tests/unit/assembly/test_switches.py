"""Every part of drafting has a switch: switched off, it drafts nothing, and the text stays the target's own."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from omnidraft import assembly, config
from omnidraft.assembly.drafting import SharedDrafting, memory_proposer, policy, proposer
from omnidraft.decode.drafting.session_pool import DrafterMemory
from omnidraft.decode.policy.cost_model import CostCurve, StepCosts
from omnidraft.decode.recording.record_builder import RecordContext, TraceRecordBuilder
from omnidraft.distill.examples.training_example import ExampleBuilder
from omnidraft.errors import ConfigError
from omnidraft.ports import Request, Sampling, Source, Step, TreeLimits
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget
from omnidraft.traces import codec
from omnidraft.traces.record import SOURCES, TraceRecord
from omnidraft.vocab.ngram_cache import NgramCache
from tests.unit.decode.toys import (
    ALIGNMENT,
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    TABLE,
    TARGET_TOKENIZER,
    emitted,
    make_request,
    slow_decode,
    toy_decoder,
)
from tests.warm_cache import warmed

MEMORIES = {Source.LOOKUP, Source.SUFFIX}
WORDS = assembly.Vocabularies(
    Path(),
    TARGET_TOKENIZER,  # type: ignore[arg-type]
    drafter_folder=Path(),
    drafter=DRAFT_TOKENIZER,  # type: ignore[arg-type]
    alignment=ALIGNMENT,
)
SWITCHES = st.fixed_dictionaries(
    {
        "splits": st.booleans(),
        "trees": st.booleans(),
        "suffix_memory": st.booleans(),
        "lookup": st.booleans(),
        "policy": st.sampled_from(["fixed", "cost", "threshold"]),
    }
)


@dataclass
class Decoded:
    """A text with all that it was drafted from."""

    request: Request
    steps: list[Step]
    cache: NgramCache
    cache_before: dict[str, np.ndarray]

    @property
    def kinds(self) -> set[Source | None]:
        return {source for step in self.steps for source in step.tree.sources[1:]}

    @property
    def cache_is_as_before(self) -> bool:
        after = self.cache.to_arrays()
        return all(np.array_equal(array, after[name]) for name, array in self.cache_before.items())


def decoded(
    seed: int, *, mode: str = "online", temperature: float = 0.0, limits: TreeLimits | None = None, **decode: Any
) -> Decoded:
    """Decode a text with what these switches leave of drafting, from a cache that knows every merge."""
    settings = config.load(None, {}, decode=decode, cache={"mode": mode})
    pass_s, step_s = CostCurve({1: 1.0, 16: 1.2}), CostCurve({1: 0.03, 4: 0.035, 64: 0.4})
    chosen = policy(settings.decode, lambda: pass_s, lambda: step_s)
    shared = SharedDrafting(lambda mode: chosen, StepCosts(), DrafterMemory(65_536))
    cache = warmed(assembly.ngram_cache(settings, WORDS, None), ALIGNMENT)
    before = cache.to_arrays()
    drafter = ToyDrafter(ToyTable.random(len(DRAFT_PIECES), seed))
    made = proposer(settings.decode, WORDS, shared, drafter, cache)
    request = make_request(Sampling(temperature), seed=seed, num_draft_tokens=12, max_new_tokens=40)
    target = ToyTarget(TABLE, limits=limits)
    steps = list(toy_decoder(trace_top_k=4).with_target(target).decode(request, made))
    return Decoded(request, steps, cache, before)


def record_of(text: Decoded) -> TraceRecord:
    origin = RecordContext("request", "tenant", "worker", "target", "drafter", None, ALIGNMENT.fingerprint)
    records: list[TraceRecord] = []
    builder = TraceRecordBuilder(text.request, origin, records.append)
    for step in text.steps:
        builder.take(step)
    [record] = records
    return codec.decode(codec.encode(record), codec.headers(record))


@examples(max_examples=30)
@given(
    SWITCHES,
    st.sampled_from(["online", "frozen", "off"]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([None, TreeLimits(5, 1), TreeLimits(6, 2, 3)]),
    st.integers(0, 1000),
)
def test_what_is_off_never_drafts_and_the_text_is_that_of_plain_decoding(
    switches: dict[str, Any], mode: str, temperature: float, limits: TreeLimits | None, seed: int
) -> None:
    text = decoded(seed, mode=mode, temperature=temperature, limits=limits, **switches)
    assert emitted(text.steps) == slow_decode(TABLE, text.request)
    forbidden = {Source.MERGE} if mode == "off" else set()
    forbidden |= set() if switches["splits"] else {Source.SPLIT}
    forbidden |= set() if switches["suffix_memory"] else {Source.SUFFIX}
    forbidden |= MEMORIES if not switches["suffix_memory"] and not switches["lookup"] else set()
    assert not text.kinds & forbidden
    assert switches["trees"] or all(step.tree.is_chain for step in text.steps)
    assert mode == "online" or text.cache_is_as_before
    record = record_of(text)
    assert record.emitted_ids.tolist() == emitted(text.steps)
    assert {SOURCES[number] for number in record.rounds.sources_M} == text.kinds
    learned = ExampleBuilder(DRAFT_TOKENIZER, TARGET_TOKENIZER.vocabulary, ALIGNMENT, max_tokens=400).build(record)
    assert set(learned.emitted_P.tolist()) <= set(record.emitted_ids.tolist())


def test_each_switch_takes_away_what_is_drafted_otherwise() -> None:
    """The toys draft in every way, so the promise above is not kept by drafting nothing."""
    everything = [decoded(seed, policy="fixed") for seed in range(6)]
    assert set().union(*(text.kinds for text in everything)) == {
        Source.DIRECT,
        Source.SPLIT,
        Source.MERGE,
        Source.SUFFIX,
    }
    assert not all(step.tree.is_chain for text in everything for step in text.steps)
    assert not all(text.cache_is_as_before for text in everything)
    direct = [
        decoded(seed, policy="fixed", splits=False, trees=False, suffix_memory=False, lookup=False, mode="off")
        for seed in range(6)
    ]
    assert set().union(*(text.kinds for text in direct)) == {Source.DIRECT}
    assert sum(len(step.tree) - 1 for text in direct for step in text.steps) > 50


def test_without_a_drafter_memory_drafts_chains_where_trees_are_off() -> None:
    settings = config.load(None, {}, decode={"policy": "fixed", "trees": False}).decode
    cost = CostCurve({1: 1.0})
    chosen = policy(settings, lambda: cost, lambda: cost)
    shared = SharedDrafting(lambda mode: chosen, StepCosts(), None)  # type: ignore[arg-type]
    request = make_request(Sampling(0.0), max_new_tokens=80, num_draft_tokens=12)
    steps = list(toy_decoder().decode(request, memory_proposer(settings, WORDS, shared)))
    assert any(len(step.tree) > 1 for step in steps)
    assert all(step.tree.is_chain for step in steps)


def test_a_frozen_cache_merges_as_an_online_one_at_the_same_text() -> None:
    """Only what is learned on the way tells the two apart, and a warm cache of the toys has nothing left to learn."""
    for seed in range(3):
        online, frozen = (decoded(seed, mode=mode, policy="fixed") for mode in ("online", "frozen"))
        assert [step.tree for step in online.steps] == [step.tree for step in frozen.steps]


def test_splits_leave_the_alignment_and_nothing_else() -> None:
    direct = ALIGNMENT.without_splits()
    assert direct.fingerprint == ALIGNMENT.fingerprint
    for token in range(ALIGNMENT.num_draft):
        pieces = ALIGNMENT.pieces(token)
        assert direct.pieces(token) == (pieces if len(pieces) == 1 else ())
    assert [direct.draft_pieces(token) for token in range(direct.num_target)] == [
        ALIGNMENT.draft_pieces(token) for token in range(ALIGNMENT.num_target)
    ]
    assert direct.num_direct == ALIGNMENT.num_direct


@pytest.mark.parametrize("section", [{"decode": {"splits": "some"}}, {"cache": {"mode": "on"}}])
def test_a_switch_has_the_values_that_it_says(section: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        config.load(None, {}, **section)
