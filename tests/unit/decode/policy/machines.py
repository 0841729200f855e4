"""The decoder, the drafter, the measured costs and the policy as they are, over toy models whose passes and steps
advance a virtual clock by the seconds of a 1.5B target in 8 bits and a 135M drafter on two cores, or of a device whose
rows are free."""

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import numpy as np
import pytest
import torch

from omnidraft.config import SchedulerSettings
from omnidraft.decode import round
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting import drafter
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy import cost_measurement
from omnidraft.decode.policy.chain import FixedPolicy
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

MACHINES = {
    "AVX-512": {
        "pass": {1: 0.069, 2: 0.077, 4: 0.085, 8: 0.083, 16: 0.132, 32: 0.175, 64: 0.382},
        "step": {1: 0.0052, 2: 0.0058, 4: 0.0059, 64: 0.03},
    },
    "AVX2": {
        "pass": {1: 0.069, 2: 0.077, 4: 0.109, 8: 0.177, 16: 0.298, 32: 0.568, 64: 1.129},
        "step": {1: 0.006, 2: 0.0068, 4: 0.0085, 64: 0.06},
    },
    "free rows": {
        "pass": {1: 0.02, 64: 0.02, 128: 0.038, 256: 0.075},
        "step": {1: 0.003, 4: 0.003, 64: 0.0032, 512: 0.008},
    },
}
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

    def __init__(self, name: str) -> None:
        self.now_s = 0.0
        self.load: Load = lambda what: 1.0
        self._noise = np.random.default_rng(0)
        self._curves = MACHINES[name]

    def perf_counter(self) -> float:
        """Return the time."""
        return self.now_s

    __call__ = perf_counter

    def seconds(self, what: str, rows: int) -> float:
        """Return what a pass or a step over so many rows takes now."""
        curve, noise = self._curves[what], math.exp(0.04 * self._noise.standard_normal())
        return float(np.interp(rows, list(curve), list(curve.values()))) * self.load(what) * noise

    @contextmanager
    def spend(self, what: str, rows: int) -> Iterator[None]:
        """Let a pass or a step over so many rows take its time, with all that it consists of."""
        end_s = self.now_s + self.seconds(what, rows)
        yield
        self.now_s = end_s


def tables(vocab_size: int, drafter_kind: str = "good", order: int = 2) -> tuple[ToyTable, ToyTable]:
    """A target's table whose texts do not end, and that of a drafter that knows most of it, or of a bad one."""
    generator = torch.Generator().manual_seed(5)
    table = 2.2 * torch.randn(64, vocab_size, generator=generator)
    table[:, :2] = -30
    return ToyTable(table, order), ToyTable(_drafter_logits(drafter_kind, table, generator), order)


def _drafter_logits(kind: str, table: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    match kind:
        case "good":
            return table + torch.randn(*table.shape, generator=generator)
        case "random":
            return 2.2 * torch.randn(*table.shape, generator=generator)
        case "sure and wrong":
            least = torch.where(table < -20, math.inf, table).argmin(1, keepdim=True)
            return torch.zeros_like(table).scatter(1, least, 40.0)
    return torch.full_like(table, math.nan)


def timed_target(machine: Machine, table: ToyTable) -> ToyTarget:
    """A target whose passes take the machine's time."""

    class Session(ToyTargetSession):
        def _score(self, tree):
            with machine.spend("pass", len(tree)):
                return super()._score(tree)

    class Target(ToyTarget):
        def open(self, prompt_ids, max_new_tokens, mode):
            return Session(self, prompt_ids[:-1], len(prompt_ids) + max_new_tokens)

        def forward(self, trees, prompts=()):
            with machine.spend("pass", sum(len(tree) for _, tree in trees) + sum(num for _, num in prompts)):
                return super().forward(trees, prompts)

    return Target(table)


def timed_drafter(machine: Machine, table: ToyTable) -> ToyDrafter:
    """A drafter whose steps do."""

    class DrafterSession(ToyDraftSession):
        def prefill_or_extend(self, keep, ids):
            with machine.spend("step", len(ids)):
                return super().prefill_or_extend(keep, ids)

        def branch(self, ids, parents):
            with machine.spend("step", len(ids)):
                return super().branch(ids, parents)

    class TimedDrafter(ToyDrafter):
        def open(self):
            return DrafterSession(self)

        def prefill_or_extend_all(self, requests):
            with machine.spend("step", sum(len(ids) for *_, ids in requests)):
                return super().prefill_or_extend_all(requests)

        def branch_all(self, requests):
            with machine.spend("step", sum(len(ids) for _, ids, _ in requests)):
                return super().branch_all(requests)

    return TimedDrafter(table)


def decode(
    machine: Machine,
    num_tokens: int,
    num_texts: int = 1,
    *,
    after_start: Callable[[], None] = lambda: None,
    drafter_kind: str = "good",
    chain: int | None = None,
) -> list[tuple[float, float]]:
    """Start beside the machine's load and decode so many texts at a time, one answer after another, by measured costs
    or with chains of one length; return tokens a text and seconds of each round."""
    target_table, drafter_table = tables(len(TOKENIZER.vocabulary), drafter_kind)
    target, model = timed_target(machine, target_table), timed_drafter(machine, drafter_table)
    costs = MeasuredCosts(target)
    policy = CostPolicy(costs.passes("fast"), costs.step_s.measured(model)) if chain is None else FixedPolicy()
    vocabulary, alignment = TOKENIZER.vocabulary, align(TOKENIZER, TOKENIZER)
    ngrams, coupling = NgramCache(alignment.fingerprint, vocabulary, vocabulary, 64), NoiseCoupling((0.0, 0.5, 1.0))
    source = drafter.Drafter(model, TOKENIZER, vocabulary, alignment, ngrams, coupling, costs.step_s.measured(model))
    proposer = TreeProposer((source,), lambda mode: policy)
    decoder = Decoder(target, vocabulary, costs=costs, scheduling=SchedulerSettings(max_num_seqs=num_texts))
    after_start()
    rounds: list[tuple[float, float]] = []
    seeds = count()
    while sum(num for num, _ in rounds) < num_tokens:
        while len(decoder.scheduler.sequences) < num_texts:
            settings = {"sampling": Sampling(1.0), "seed": next(seeds), "mode": "fast"}
            num_draft_tokens = 15 if chain is None else chain
            decoder.add(Request(PROMPT, PROMPT, 128, **settings, num_draft_tokens=num_draft_tokens), proposer)
        last_s = machine.now_s
        emitted = sum(len(output.step.emitted) for output in decoder.step() if output.step is not None)
        rounds.append((emitted / num_texts, machine.now_s - last_s))
    return rounds


def tokens_per_s(passes: list[tuple[float, float]]) -> float:
    return sum(num for num, _ in passes) / sum(seconds for _, seconds in passes)


def num_until(passes: list[tuple[float, float]], least: float) -> float:
    """Tokens until those of a window come at this speed; infinitely many where they never do."""
    window: deque[tuple[float, float]] = deque()
    total = 0.0
    for each in passes:
        window.append(each)
        total += each[0]
        while sum(num for num, _ in window) - window[0][0] >= WINDOW:
            window.popleft()
        if total >= WINDOW and tokens_per_s(list(window)) >= least:
            return total
    return math.inf


@contextmanager
def virtual_clock(name: str) -> Iterator[Machine]:
    """A machine whose clock is that of the decoder, the drafter and the measurement."""
    machine = Machine(name)
    with pytest.MonkeyPatch.context() as patched:
        for module in (cost_measurement, drafter, round):
            patched.setattr(module, "time", machine)
        yield machine
