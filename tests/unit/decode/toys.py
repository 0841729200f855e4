"""A toy pair of vocabularies, proposers from helpful to hostile, and the slow way to decode."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import AcceptanceCalibrator, NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.prompt_lookup import PromptLookup
from omnidraft.decode.drafting.safe_drafting import DraftingFailures
from omnidraft.decode.drafting.suffix_source import FleetMemory, SuffixSource, no_fleet_memory
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.policy.chain import FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.decode.sampling.noise import SeededNoise
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.memory.suffix_index import SuffixIndex
from omnidraft.ports import (
    NO_OTHERS,
    AcceptanceFn,
    DraftTree,
    Noise,
    Policy,
    Proposer,
    ProposerSession,
    Request,
    Sampling,
    Source,
    Step,
    TreeLimits,
)
from omnidraft.testing.toy_models import ToyDrafter, ToyTable, ToyTarget, ToyTokenizer
from omnidraft.vocab.alignment import Alignment, align
from omnidraft.vocab.ngram_cache import NgramCache


def known_costs(seconds_by_rows: Mapping[int, float]) -> CostCurve:
    """Costs that were observed so often that no trial has to find out what they are."""
    curve = CostCurve(seconds_by_rows)
    for rows in [*seconds_by_rows] * 20:
        curve.update(rows, curve(rows))
    return curve


LETTERS = [bytes([byte]) for byte in b"abcdefgh .\n"]
EURO = "\u20ac".encode()
TARGET_PIECES = [b"", b"", *LETTERS, b"ab", b"cd", b"abc", b"he", b" a", b"\xe2", b"\x82", b"\xac", b"e\xe2", b"gh"]
DRAFT_PIECES = [b"", b"", b"", *LETTERS, b"bc", b"abcd", b"ef", b"x", EURO, b"\xe2", b"\x82", b"\xac", b"de", b"q"]
TARGET_EOS, DRAFT_UNK, DRAFT_EOS = 1, 0, 2
D = {piece: token for token, piece in enumerate(DRAFT_PIECES) if piece}
T = {piece: token for token, piece in enumerate(TARGET_PIECES) if piece}
NOISE = SeededNoise(0, 0, len(TARGET_PIECES))

TARGET_TOKENIZER = ToyTokenizer(TARGET_PIECES, {"unk": 0, "eos": TARGET_EOS})
DRAFT_TOKENIZER = ToyTokenizer(DRAFT_PIECES, {"unk": DRAFT_UNK, "user": 1, "eos": DRAFT_EOS})
ALIGNMENT = align(DRAFT_TOKENIZER, TARGET_TOKENIZER)
TABLE = ToyTable.random(len(TARGET_PIECES), seed=7)
PROMPT = tuple(TARGET_TOKENIZER.encode("abc he.\n"))
DRAFTER_PROMPT = (1, *DRAFT_TOKENIZER.encode("abc he.\n"))


def make_request(sampling: Sampling | None = None, **fields: object) -> Request:
    defaults = {"max_new_tokens": 24, "num_draft_tokens": 5, "mode": "fast", "sampling": sampling or Sampling(1.0)}
    return Request(PROMPT, DRAFTER_PROMPT, **(defaults | fields))  # type: ignore[arg-type]


def emitted(steps: Iterable[Step]) -> list[int]:
    return [token for step in steps for token in step.emitted]


def make_cache(capacity: int = 64) -> NgramCache:
    return NgramCache(ALIGNMENT.fingerprint, DRAFT_TOKENIZER.vocabulary, TARGET_TOKENIZER.vocabulary, capacity)


def with_unmeasured_acceptance(proposer: TreeProposer) -> TreeProposer:
    """The same proposer, whose estimates stay those of the drafter's own probabilities."""
    unmeasured = AcceptanceCalibrator()
    unmeasured.update = lambda *args, **options: None  # type: ignore[method-assign]
    proposer.calibrators.of_new_text = lambda tenant, work: unmeasured  # type: ignore[method-assign]
    return proposer


def make_drafter(
    table: ToyTable | None = None,
    *,
    alignment: Alignment = ALIGNMENT,
    cache: NgramCache | None = None,
    noise_weight: float = 0.0,
    min_path_probability: float = 0.0,
    policy: Policy | None = None,
    has_lookup: bool = False,
    context_limit: int = 4096,
    acceptance: AcceptanceFn | None = None,
) -> TreeProposer:
    """The real proposer over a toy drafter; random weights and chains by default."""
    chosen_policy = policy or (ThresholdPolicy(min_path_probability) if min_path_probability else FixedPolicy())
    drafter = Drafter(
        ToyDrafter(
            table or ToyTable.random(len(DRAFT_PIECES), seed=3), context_limit=context_limit, acceptance=acceptance
        ),
        DRAFT_TOKENIZER,
        TARGET_TOKENIZER.vocabulary,
        alignment,
        make_cache() if cache is None else cache,
        NoiseCoupling((noise_weight,)),
    )
    return TreeProposer((PromptLookup(), drafter) if has_lookup else (drafter,), lambda mode: chosen_policy)


def memory_proposer(
    fleet: FleetMemory = no_fleet_memory, *, recent: RecentTexts | None = None, policy: Policy | None = None
) -> TreeProposer:
    """Drafts from memory alone."""
    chosen_policy = policy or FixedPolicy()
    source = SuffixSource(len(TARGET_PIECES), recent or RecentTexts(0), fleet)
    return TreeProposer((source,), lambda mode: chosen_policy)


def hostile_memory(tenant: str) -> SuffixIndex:
    """A fleet's memory of ids that are no tokens, in an order that is none."""
    draws = np.random.default_rng(5)
    ids = np.where(draws.random(300) < 0.2, draws.integers(0, 2**32, 300), draws.integers(0, len(TARGET_PIECES), 300))
    return SuffixIndex.from_arrays(
        {"ids": ids.astype(np.uint32), "order": draws.integers(0, 400, 300).astype(np.uint32)}
    )


def table_of(num_ids: int, favourite_after: dict[int, int], favourite: int) -> ToyTable:
    """A drafter that is nearly sure of its next token: by the last one, else `favourite`."""
    import torch

    logits = torch.zeros(num_ids + 1, num_ids)
    logits[:, favourite] = 9.0
    for last, token in favourite_after.items():
        row = (last + 1) % (num_ids + 1)
        logits[row] = 0.0
        logits[row, token] = 9.0
    return ToyTable(logits, order=1)


# ---------------------------------------------------------------- the slow way


def slow_uniform(seed: int, choice: int, position: int, token: int) -> float:
    """One Philox word of numpy's 4 x 64 generator, computed alone."""
    key = np.array([seed, choice], np.uint64)
    words = np.random.Philox(key=key, counter=[token // 4, position, 0, 0]).random_raw(4)
    return (2 * (int(words[token % 4]) >> 12) + 1) * 2.0**-53


def slow_logits(logits: Sequence[float], sampling: Sampling, prompt: Sequence[int], said: Sequence[int]) -> list[float]:
    """Penalties and bias by their definitions, token by token."""
    changed = []
    for token, logit in enumerate(logits):
        if token in prompt or token in said:
            logit = logit / sampling.repetition_penalty if logit > 0 else logit * sampling.repetition_penalty
        logit -= sampling.frequency_penalty * list(said).count(token)
        logit -= sampling.presence_penalty * (token in said)
        changed.append(logit + sampling.logit_bias.get(token, 0.0))
    return changed


def slow_shape(logits: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """Temperature, top-k, top-p, min-p by their definitions."""
    row = np.array(logits, np.float64)
    if sampling.temperature == 0:
        return {min(token for token in range(len(row)) if row[token] == row.max()): 1.0}
    weights = np.exp((row - row.max()) / sampling.temperature)
    weights /= weights.sum()
    order = sorted(range(len(row)), key=lambda token: (-weights[token], token))[: sampling.top_k]
    if sampling.top_p is not None and sampling.top_p < 1:
        total, mass, front = sum(weights[token] for token in order), 0.0, []
        for token in order:
            front.append(token)
            mass += weights[token] / total
            if mass >= sampling.top_p:
                break
        order = front
    if sampling.min_p is not None:
        order = [token for token in order if weights[token] >= sampling.min_p * max(weights)]
    total = sum(weights[token] for token in order)
    return {token: weights[token] / total for token in order if weights[token] > 0}


def slow_decode(table: ToyTable, request: Request) -> list[int]:
    """One token at a time: the race E / p by its definition, then the ends by theirs."""
    ids: list[int] = []
    while len(ids) < request.max_new_tokens:
        text = [*request.prompt_ids, *ids]
        logits = slow_logits(table.logits(text).tolist(), request.sampling, request.prompt_ids, ids)
        p = slow_shape(logits, request.sampling)
        times = {
            token: -np.log1p(-slow_uniform(request.seed, request.choice, len(text), token)) / p[token] for token in p
        }
        ids.append(min(times, key=lambda token: (times[token], token)))
        spelled = TARGET_TOKENIZER.vocabulary.spell([token for token in ids if token not in request.stop_ids])
        if ids[-1] in request.stop_ids or any(stop in spelled for stop in request.stop_strings):
            break
    return ids


# ---------------------------------------------------------------- proposers


def budget_of(limits: TreeLimits) -> int:
    """Nodes that fit however they stand."""
    return limits.num_nodes if limits.depth is None else min(limits.num_nodes, limits.depth)


@dataclass
class TableProposer(Proposer):
    """Guesses from a table over the target's vocabulary, with `width` siblings at every depth. The target's own table
    makes it good, any other bad."""

    table: ToyTable
    width: int = 1
    noise_weight: float = 0.0

    def open(self, request: Request) -> "_TableSession":
        return _TableSession(self, list(request.prompt_ids), request.sampling.temperature)


@dataclass
class _TableSession(ProposerSession):
    proposer: TableProposer
    ids: list[int]
    temperature: float

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        tokens, parents, budget = [self.ids[-1]], [0], budget_of(limits)
        text, parent = list(self.ids), 0
        while len(tokens) - 1 + self.proposer.width <= budget:
            best = self._best(text, position + len(text) - len(self.ids), noise)
            tokens += best
            parents += [parent] * len(best)
            parent = len(tokens) - len(best)
            text.append(best[0])
        return tree(tokens, parents)

    def observe(self, emitted: Sequence[int]) -> None:
        self.ids += emitted

    def _best(self, text: list[int], position: int, noise: Noise) -> list[int]:
        scores = self.proposer.table.logits(text).double().numpy() / (self.temperature or 1.0)
        if self.proposer.noise_weight and self.temperature:
            gumbel = -np.log(noise.exponentials(position, np.arange(len(scores))))
            scores = scores + self.proposer.noise_weight * gumbel
        return np.argsort(-scores, kind="stable")[: self.proposer.width].tolist()


@dataclass
class RandomTrees(Proposer):
    """Hostile: any tree within the budget, of any tokens: stop tokens, special tokens, copies of the context."""

    seed: int
    num_ids: int = len(TARGET_PIECES)

    def open(self, request: Request) -> "_RandomSession":
        return _RandomSession(np.random.default_rng(self.seed), list(request.prompt_ids), self.num_ids)


@dataclass
class _RandomSession(ProposerSession):
    rng: np.random.Generator
    ids: list[int]
    num_ids: int
    tokens: list[int] = field(default_factory=list)

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        tokens, parents, budget = [self.ids[-1]], [0], budget_of(limits)
        for _ in range(int(self.rng.integers(budget + 1))):
            parent = int(self.rng.integers(len(tokens)))
            copied = self.ids[int(self.rng.integers(len(self.ids)))]
            token = copied if self.rng.random() < 0.5 else int(self.rng.integers(self.num_ids))
            if (parent, token) not in zip(parents[1:], tokens[1:], strict=True):
                tokens.append(token)
                parents.append(parent)
        noise.exponentials(position + budget, np.arange(3))
        return tree(tokens, parents)

    def observe(self, emitted: Sequence[int]) -> None:
        self.ids += emitted


def tree(tokens: Sequence[int], parents: Sequence[int]) -> DraftTree:
    """Tokens and parents, the root among them."""
    num_drafted = len(tokens) - 1
    return DraftTree(
        tuple(tokens), tuple(parents), (None, *[Source.LOOKUP] * num_drafted), (0.0, *[-1.0] * num_drafted)
    )


class EmptyProposer(Proposer):
    """Never drafts."""

    def open(self, request: Request) -> "_EmptySession":
        return _EmptySession(request.prompt_ids[-1])


@dataclass
class _EmptySession(ProposerSession):
    root: int

    def propose(self, position: int, limits: TreeLimits, noise: Noise) -> DraftTree:
        return DraftTree.empty(self.root)

    def observe(self, emitted: Sequence[int]) -> None:
        self.root = emitted[-1]


PROPOSERS: dict[str, Proposer] = {
    "good": TableProposer(TABLE),
    "good tree": TableProposer(TABLE, width=2),
    "coupled": TableProposer(TABLE, noise_weight=1.0),
    "bad": TableProposer(ToyTable.random(len(TARGET_PIECES), seed=99)),
    "empty": EmptyProposer(),
    "hostile": RandomTrees(seed=5),
}


class Strict(DraftingFailures):
    """Raises the failure, for tests of faulty proposers."""

    def report(self, error: Exception) -> None:
        raise error


def toy_decoder(**options: object) -> Decoder:
    return Decoder(ToyTarget(TABLE), TARGET_TOKENIZER.vocabulary, **{"failures": Strict(), **options})  # type: ignore[arg-type]


class Wide(FixedPolicy):
    """So many candidates and rows, for so many steps."""

    def __init__(self, num_candidates: int, num_rows: int, num_steps: int) -> None:
        self.num_candidates = num_candidates
        self._num_rows, self._num_steps = num_rows, num_steps
        self.num_asked, self.seen = 0, []

    def select_expansions(self, values, num_nodes):
        assert list(values) == sorted(values, reverse=True)
        self.num_asked += 1
        return self._num_rows if self.num_asked <= self._num_steps else 0

    def update(self, outcomes, others=NO_OTHERS):
        (outcome,) = outcomes
        self.seen.append((outcome.num_emitted, outcome.num_nodes, list(outcome.step_rows)))
        self.num_asked = 0
