"""A start beside other load turns drafting off for no longer than a few answers: the decoder, the drafter, the measured
costs and the policy as they are, over toy models whose passes and steps advance a virtual clock by the seconds of a
1.5B target in 8 bits and a 135M drafter on AVX-512."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

from omnidraft.decode import round
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting import drafter
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy import cost_model
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.ports import Request, Sampling
from omnidraft.testing.toy_models import (
    ToyDrafter,
    ToyDraftSession,
    ToyTable,
    ToyTarget,
    ToyTargetSession,
    ToyTokenizer,
)
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache

PASSES = {1: 0.069, 2: 0.077, 4: 0.085, 8: 0.083, 16: 0.132, 32: 0.175, 64: 0.382}
STEPS = {1: 0.0052, 2: 0.0058, 4: 0.0059, 64: 0.03}
TOKENIZER = ToyTokenizer(
    [
        b"",
        b"",
        *[bytes([each]) for each in b"abcdefghijklmnopqrstuvwxyz .\n,"],
        b"ab",
        b"cd",
        b"the",
        b" a",
        b"in",
        b"er",
    ],
    {"unk": 0, "eos": 1},
)
PROMPT = tuple(TOKENIZER.encode("the cat in the hat. " * 6))
WINDOW = 200
"""Tokens over which a speed is taken."""

Load = Callable[[str], float]
"""How many times as long a "pass" or a "step" takes now."""


class Machine:
    """A clock that passes and steps advance, and nothing else, by their seconds, a little noise, and other load."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.load: Load = lambda what: 1.0
        self._noise = np.random.default_rng(0)
        self._curves = {"pass": PASSES, "step": STEPS}

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    def spend(self, what: str, rows: int) -> None:
        """Let a pass or a step over so many rows take its time."""
        curve = self._curves[what]
        seconds = float(np.interp(rows, list(curve), list(curve.values())))
        self.now_s += seconds * self.load(what) * math.exp(0.04 * self._noise.standard_normal())


def timed_models(machine: Machine) -> tuple[ToyTarget, ToyDrafter]:
    """A target, and a drafter that knows most of it."""

    class Session(ToyTargetSession):
        def _score(self, tree):
            machine.spend("pass", len(tree))
            return super()._score(tree)

    class Target(ToyTarget):
        def open(self, prompt_ids, max_new_tokens, mode):
            return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)

        def forward(self, trees, prompts=()):
            before_s = machine.now_s
            result = super().forward(trees, prompts)
            machine.now_s = before_s  # all of it is one pass
            machine.spend("pass", sum(len(tree) for _, tree in trees) + sum(num for _, num in prompts))
            return result

    class DrafterSession(ToyDraftSession):
        def prefill_or_extend(self, keep, ids):
            machine.spend("step", len(ids))
            return super().prefill_or_extend(keep, ids)

        def branch(self, ids, parents):
            machine.spend("step", len(ids))
            return super().branch(ids, parents)

    class TimedDrafter(ToyDrafter):
        def open(self):
            return DrafterSession(self)

    generator, size = torch.Generator().manual_seed(5), (64, len(TOKENIZER.vocabulary))
    table = 2.2 * torch.randn(*size, generator=generator)
    table[:, :2] = -30  # no end
    return Target(ToyTable(table)), TimedDrafter(ToyTable(table + torch.randn(*size, generator=generator)))


def decode(machine: Machine, num_tokens: int, after_start: Callable[[], None]) -> list[tuple[int, float]]:
    """Start beside the machine's load and decode one answer after another; return tokens and seconds of each pass."""
    target, model = timed_models(machine)
    costs = MeasuredCosts(target)
    policy = CostPolicy(costs.passes("fast"), costs.step_s)
    vocabulary, alignment = TOKENIZER.vocabulary, align(TOKENIZER, TOKENIZER)
    ngrams, coupling = NgramCache(alignment.fingerprint, vocabulary, vocabulary, 64), NoiseCoupling((0.0, 0.5, 1.0))
    source = drafter.Drafter(model, TOKENIZER, vocabulary, alignment, ngrams, coupling, costs.step_s.measured(model))
    proposer, decoder = TreeProposer((source,), lambda mode: policy), Decoder(target, vocabulary, costs=costs)
    after_start()
    passes: list[tuple[int, float]] = []
    for seed in count():
        last_s = machine.now_s
        request = Request(PROMPT, PROMPT, 128, Sampling(1.0), seed, mode="fast", num_draft_tokens=15)
        for step in decoder.decode(request, proposer):
            passes.append((len(step.emitted), machine.now_s - last_s))
            last_s = machine.now_s
            if sum(num for num, _ in passes) >= num_tokens:
                return passes
    raise AssertionError


def tokens_per_s(passes: list[tuple[int, float]]) -> float:
    return sum(num for num, _ in passes) / sum(seconds for _, seconds in passes)


def num_until(passes: list[tuple[int, float]], least: float) -> float:
    """Tokens until those of a window come at this speed; infinitely many where they never do."""
    window: deque[tuple[int, float]] = deque()
    total = 0
    for each in passes:
        window.append(each)
        total += each[0]
        while sum(num for num, _ in window) - window[0][0] >= WINDOW:
            window.popleft()
        if total >= WINDOW and tokens_per_s(list(window)) >= least:
            return total
    return math.inf


@contextmanager
def virtual_clock() -> Iterator[Machine]:
    """A machine whose clock is that of the decoder, the drafter and the measurement."""
    machine = Machine()
    with pytest.MonkeyPatch.context() as patched:
        for module in (cost_model, drafter, round):
            patched.setattr(module, "time", machine)
        yield machine


@pytest.fixture(scope="module")
def quiet_rate() -> float:
    """Tokens a second after a start beside no load."""
    with virtual_clock() as machine:
        passes = decode(machine, 600, lambda: None)
    return tokens_per_s(passes[len(passes) // 2 :])


@pytest.mark.parametrize(
    ("slow", "factor", "more_s"),
    [("pass step", 4, 0), ("pass step", 10, 5), ("pass", 10, 0), ("step", 10, 0)],
    ids=["all", "longer", "passes", "steps"],
)
def test_a_start_beside_other_load_is_forgotten_within_330_tokens(quiet_rate, slow, factor, more_s):
    with virtual_clock() as machine:
        end_s = math.inf
        machine.load = lambda what: factor if what in slow and machine.now_s < end_s else 1.0

        def end_load() -> None:
            nonlocal end_s
            end_s = machine.now_s + more_s

        passes = decode(machine, 600, end_load)
    assert num_until(passes, 0.9 * quiet_rate) <= 330


def test_drafting_pays_on_this_machine(quiet_rate):
    assert quiet_rate > 1.5 / PASSES[1]
