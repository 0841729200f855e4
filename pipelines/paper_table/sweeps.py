"""The paper's smaller tables, for one target and task: LoRA ranks, losses, n-gram caches, adaptive drafting,
temperatures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft import config, wiring
from pipelines.paper_table.agreement import learned_agreement
from pipelines.paper_table.cache_comparison import compare_caches, num_canonical, warm_bounds
from pipelines.paper_table.decoding import PLAIN, Decoding, Way, decode_all
from pipelines.paper_table.methods import METHODS, snapshot
from pipelines.paper_table.parts import TablePlan, prompts_of, records, settings_for
from pipelines.paper_table.result_cache import ResultCache

PREFIX, SEPARATOR = "sweep/", "//"
"""A sweep's cells are sweep/TARGET/TASK//NAME; the target may be a path."""
LORA_RANKS = (8, 16, 32, 64, 128)
LAMBDAS = (0.1, 0.2, 0.5, 1.0)
DISTILLED = ("dm_paper", "dm", "nll")
"""Reverse KL on directly mapped tokens, forward KL, and the likelihood of the emitted text."""
TEMPERATURES = (0.01, 1.0)
GAMMAS = (0.5, 0.7, 0.9)
"""Probabilities of a rejection in the chain at which it ends."""
CHAINS: Mapping[str, Any] = {"suffix_memory": False, "lookup": False, "trees": False}
"""Section `decode` of adaptive drafting: a model's chains alone, so that only their lengths differ."""


@dataclass(frozen=True, slots=True)
class AdaptiveMethod:
    """A row of the paper's Table 2: what has learned, and what ends a chain."""

    head: bool | None
    """`learner.head`; None: the drafter stays as it comes."""
    decode: Mapping[str, Any]


ADAPTIVE: Mapping[str, AdaptiveMethod] = {
    "static": AdaptiveMethod(None, {"policy": "fixed", "num_draft_tokens": 4}),
    "untrained, cost": AdaptiveMethod(None, {"policy": "cost"}),
    "distill only": AdaptiveMethod(False, {"policy": "fixed", "num_draft_tokens": 4}),
    "distill only, threshold": AdaptiveMethod(False, {"policy": "threshold"}),
    "distill only, cost": AdaptiveMethod(False, {"policy": "cost"}),
    **{
        f"interleaved, gamma {gamma:g}": AdaptiveMethod(True, {"policy": "acceptance", "max_rejection": gamma})
        for gamma in GAMMAS
    },
}


@dataclass(frozen=True, slots=True)
class Sweep:
    """One target and task, and the cells of their figures."""

    target: str
    task: str
    plan: TablePlan
    num_decoded: int
    cells: ResultCache

    def lora(self) -> None:
        """Learn in full weights and in LoRA factors."""
        self._learn("lora/full", {})
        for rank in LORA_RANKS:
            self._learn(f"lora/{rank}", {"train": "lora", "lora_rank": rank}, over={})

    def loss(self) -> None:
        """Learn with each form of L_DM, alone and with L_ngram, whose weight varies beside the paper's form."""
        for form in DISTILLED:
            self._learn(f"loss/{form}", {"loss": form})
            for weight in LAMBDAS if form == DISTILLED[0] else (0.2,):
                loss = f"{form} + {weight:g} ngram"
                self._learn(f"loss/{loss}", {"loss": loss}, over={"loss": form})

    def cache(self) -> None:
        """Measure bounded caches on records, and decode from warm ones."""
        settings = settings_for(self.target, self.plan)
        self.cells.get(self._key("cache"), partial(self._compare_caches, settings))
        self._decode("warm-cache", self._warm_caches)

    def adaptive(self) -> None:
        """Decode with chains of a fixed length and of lengths by policies, before and after learning."""
        self._decode("adaptive", self._adaptive_ways)

    def temperature(self) -> None:
        """Decode with the paper's method and ours at other temperatures."""
        for temperature in TEMPERATURES:
            self._decode(f"temperature/{temperature:g}", partial(self._methods_at, temperature))

    def _learn(self, key: str, learner: Mapping[str, Any], over: Mapping[str, Any] | None = None) -> None:
        """Measure what learns with this section `learner`, and its gain over what learns with another one."""
        settings = settings_for(self.target, self.plan, learner=dict(learner))
        reference = None if over is None else settings_for(self.target, self.plan, learner=dict(over))
        self.cells.get(self._key(key), partial(learned_agreement, settings, self.task, self.plan, reference))

    def _decode(self, key: str, load: Callable[[], Mapping[str, Way]]) -> None:
        texts = prompts_of(self.task, "test", self.plan)[: self.num_decoded]
        decode_all(self.cells, self._key(key), texts, load)

    def _key(self, name: str) -> str:
        return f"{PREFIX}{self.target}/{self.task}{SEPARATOR}{name}"

    def _compare_caches(self, settings: config.Settings) -> dict[str, Any]:
        train, test = (records(settings, self.task, split, self.plan) for split in ("train", "test"))
        return compare_caches(settings, train, test)

    def _warm_caches(self) -> dict[str, Way]:
        """Return a way for each bound of a cache that began with every canonical n-gram and learned the train split."""
        method = METHODS["dm+ngram"]
        settings = method.settings(self.target, self.plan)
        full = num_canonical(wiring.vocabularies(settings))
        bounds = {"off": {"mode": "off"}, **dict(warm_bounds(full))}
        warm = _with_cache(settings, {"warm": True, "capacity": max(full, settings.cache.capacity)})
        folder = snapshot(warm, self.task, self.plan)
        decoding = Decoding(settings, self.plan.max_new_tokens)
        ways = {name: decoding.drafting(folder, _with_cache(settings, section)) for name, section in bounds.items()}
        return {PLAIN: decoding.plain(), **ways}

    def _adaptive_ways(self) -> dict[str, Way]:
        heads = dict.fromkeys(method.head for method in ADAPTIVE.values())
        drafters = {head: self._learned_with(head) for head in heads}  # before the target takes its memory
        decoding = Decoding(settings_for(self.target, self.plan), self.plan.max_new_tokens)
        ways = {PLAIN: decoding.plain()}
        for name, method in ADAPTIVE.items():
            settings, folder = drafters[method.head]
            decode = settings.decode.model_copy(update={**CHAINS, **method.decode})
            ways[name] = decoding.drafting(folder, settings.model_copy(update={"decode": decode}))
        return ways

    def _learned_with(self, head: bool | None) -> tuple[config.Settings, Path]:
        """Return settings, and the snapshot folder of what learned with this `learner.head`; None: the n-gram cache
        alone did, as it does in every row."""
        settings = METHODS["ours"].settings(self.target, self.plan, head=bool(head))
        return settings, snapshot(settings, self.task, self.plan, is_trained=head is not None)

    def _methods_at(self, temperature: float) -> dict[str, Way]:
        return ways_of(self.target, self.task, ("spd-dm", "dm+ngram", "ours"), self.plan, temperature)


SWEEPS: Mapping[str, Callable[[Sweep], None]] = {
    "lora": Sweep.lora,
    "loss": Sweep.loss,
    "cache": Sweep.cache,
    "adaptive": Sweep.adaptive,
    "temperature": Sweep.temperature,
}


def ways_of(
    target: str, task: str, names: tuple[str, ...], plan: TablePlan, temperature: float = 0.0
) -> dict[str, Way]:
    """Return plain decoding and the methods of these names, after they learned."""
    folders = {name: METHODS[name].snapshot(target, task, plan) for name in names}
    decoding = Decoding(settings_for(target, plan), plan.max_new_tokens, temperature)
    ways = {name: decoding.drafting(folder, METHODS[name].settings(target, plan)) for name, folder in folders.items()}
    return {PLAIN: decoding.plain(), **ways}


def _with_cache(settings: config.Settings, section: Mapping[str, Any]) -> config.Settings:
    return settings.model_copy(update={"cache": settings.cache.model_copy(update=dict(section))})
