"""Whatever drafting raises, the text is the target's own; failures are counted, outages are logged."""

import logging
from dataclasses import dataclass, field, replace

import pytest
import torch

from omnidraft.decode.drafting.safe_drafting import DraftingFailures
from omnidraft.ports import DraftTree, Proposer, ProposerSession, Sampling
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.testing.toy_models import ToyTable
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    TABLE,
    TableProposer,
    emitted,
    make_drafter,
    make_request,
    slow_decode,
    toy_decoder,
)

pytestmark = pytest.mark.drafting_fails
FAILURES = "omnidraft_drafting_failures_total"


@dataclass
class Breaking(Proposer, ProposerSession):
    """Drafts well, until one of its calls raises."""

    call: str
    error: Exception
    num_good: int = 0
    calls: list[str] = field(default_factory=list)

    def open(self, request):
        self.left, self.session = self.num_good, TableProposer(TABLE).open(request)
        self._called("open")
        return self

    def propose(self, position, limits, noise):
        self._called("propose")
        return self.session.propose(position, limits, noise)

    def observe(self, ids):
        self._called("observe")
        self.session.observe(ids)

    def _called(self, name):
        self.calls.append(name)
        if name == self.call:
            if not self.left:
                raise self.error
            self.left -= 1


@pytest.mark.parametrize(
    ("call", "num_good", "error"),
    [
        ("open", 0, RuntimeError("a bug")),
        ("propose", 0, MemoryError()),
        ("propose", 3, AssertionError("no session")),
        ("observe", 2, ValueError("odd keys")),
    ],
    ids=str,
)
def test_a_text_whose_drafting_fails_is_plain_decodings(call, num_good, error):
    metrics, proposer = CountingMetrics(), Breaking(call, error, num_good)
    request = make_request(seed=3)
    steps = list(toy_decoder(failures=DraftingFailures(metrics, "t")).decode(request, proposer))
    assert emitted(steps) == slow_decode(TABLE, request)
    assert metrics.value(FAILURES, target="t") == 1
    assert any(len(step.tree) > 1 for step in steps) == (num_good > 0)


def test_after_a_failure_nothing_is_drafted_from_keys_that_nobody_knows():
    proposer = Breaking("propose", RuntimeError("half a pass"), 2)
    steps = list(toy_decoder(failures=DraftingFailures()).decode(make_request(), proposer))
    assert proposer.calls.count("propose") == 3
    assert proposer.calls[-1] == "propose"
    assert all(len(step.tree) == 1 for step in steps[2:])


def test_the_next_text_drafts_again():
    proposer, decoder = Breaking("propose", RuntimeError(), 1), toy_decoder(failures=DraftingFailures())
    for _ in range(2):
        assert len(next(decoder.decode(make_request(), proposer)).tree) > 1


def test_an_outage_is_told_once_and_every_failure_is_counted(caplog):
    metrics, now_s = CountingMetrics(), [0.0]
    failures = DraftingFailures(metrics, "t", clock=lambda: now_s[0])
    with caplog.at_level(logging.INFO):
        for _ in range(50):
            now_s[0] += 59.0
            failures.report(RuntimeError("broken weights"))
    assert len(caplog.records) == 1
    assert "broken weights" in str(caplog.records[0].exc_info)
    assert "roll back" in caplog.text
    now_s[0] += 61.0
    failures.report(RuntimeError())
    assert len(caplog.records) == 2
    assert metrics.value(FAILURES) == 51


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((3, 4), (0, 0)),
        ((10, 2, 2, 2, 2, 2, 2), (0, 0, 1, 2, 3, 4, 5)),
        ((10, 999), (0, 0)),
        ((10, -1), (0, 0)),
        ((10, 2, 2), (0, 0, 0)),
        ((10, 2, 3), (0, 2, 0)),
    ],
    ids=["another root", "too many", "no token", "negative", "twins", "no tree"],
)
def test_a_tree_that_would_change_the_text_is_an_empty_one(tokens, parents):
    request, metrics = make_request(), CountingMetrics()
    tokens = tuple(request.prompt_ids[-1] if token == 10 else token for token in tokens)
    bad = DraftTree(tokens, parents, (None,) * len(tokens), (0.0,) * len(tokens))

    class Misfit(Proposer, ProposerSession):
        open = observe = lambda self, ids: self
        propose = lambda self, *args: bad  # noqa: E731

    steps = list(toy_decoder(failures=DraftingFailures(metrics)).decode(request, Misfit()))
    assert emitted(steps) == slow_decode(TABLE, request)
    assert metrics.value(FAILURES) == 1


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(0.0), Sampling(1.0, logit_bias={3: 1.0})], ids=str)
@pytest.mark.parametrize("logit", [float("nan"), float("inf"), -float("inf")])
def test_a_drafter_whose_logits_are_no_numbers_has_failed(logit, sampling, recwarn):
    broken = torch.full((len(DRAFT_PIECES) + 1, len(DRAFT_PIECES)), -1.0)
    broken[:, 3 if logit > 0 or logit != logit else slice(None)] = logit
    request, metrics = make_request(sampling, seed=2), CountingMetrics()
    decoder = toy_decoder(failures=DraftingFailures(metrics))
    steps = list(decoder.decode(request, make_drafter(ToyTable(broken, order=1))))
    assert metrics.value(FAILURES) == 1
    assert not recwarn.list
    assert emitted(steps) == slow_decode(TABLE, request)


def test_a_drafter_that_cannot_read_the_prompt_only_costs_the_draft():
    """The first proposal needs its keys and raises; the text does not."""
    proposer = make_drafter()
    request = make_request(seed=1)
    too_large = tuple(token + 1000 for token in request.drafter_prompt_ids)
    odd = replace(request, drafter_prompt_ids=too_large)
    metrics = CountingMetrics()
    steps = list(toy_decoder(failures=DraftingFailures(metrics)).decode(odd, proposer))
    assert emitted(steps) == slow_decode(TABLE, request)
    assert metrics.value(FAILURES) == 1
