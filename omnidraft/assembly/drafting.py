"""Everything that drafts for a target: models, memories, and the policy over all of them."""

import hashlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from omnidraft.assembly.models import TargetVocabulary, Vocabularies
from omnidraft.config import DecodeSettings, Settings
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.loaded_factors import LoadedFactors
from omnidraft.decode.drafting.prediction_source import PredictionSource
from omnidraft.decode.drafting.prompt_lookup import PromptLookup
from omnidraft.decode.drafting.ranking import rank_tokens
from omnidraft.decode.drafting.session_pool import DrafterMemory, SessionPool
from omnidraft.decode.drafting.suffix_source import FleetMemory, SuffixSource, no_fleet_memory
from omnidraft.decode.drafting.token_healing import TokenHealing
from omnidraft.decode.drafting.tree_proposer import DraftSource, TreeProposer
from omnidraft.decode.external.prompt_mapping import map_prompt
from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_measurement import CostFile
from omnidraft.decode.policy.cost_model import CostCurve, MeasuredCosts, StepCosts
from omnidraft.decode.prefill_chunk import MAX_PREFILL_S
from omnidraft.errors import ContractError, VocabularyError
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.models.native.drafter import NativeDrafter
from omnidraft.models.probe.subprocess_trial import processor
from omnidraft.ports import DraftModel, Mode, Policy, Proposer, Target
from omnidraft.system import default_home
from omnidraft.vocab.ngram_cache import NgramCache

logger = logging.getLogger(__name__)

NOISE_WEIGHTS = (0.0, 0.5, 1.0)
"""Weights of the target's noise in drafting (w of docs/algorithms.md, section 4), of which the one that agreed best is
taken."""
_DRAFTER_IDS = 65_536
"""The ids whose keys the drafter holds for all texts of a target, running and ended; 23 kB each for SmolLM2-135M. Ended
ones give way to running ones; those that do not fit are drafted from memory alone."""


@dataclass(frozen=True, slots=True)
class SharedDrafting:
    """The part of drafting that outlives the snapshots of one target."""

    policy_for: Callable[[Mode], Policy]
    step_s: StepCosts
    memory: DrafterMemory
    recent: RecentTexts | None = None
    """What the worker said lately; None remembers nothing."""


def shared_drafting(
    settings: DecodeSettings,
    costs: MeasuredCosts,
    recent: RecentTexts | None = None,
    memory: DrafterMemory | None = None,
    *,
    has_drafter: bool = True,
) -> SharedDrafting:
    """Return policies, costs and memory for our own engine. A mode is measured when the policy first needs it."""

    @cache
    def policy_for(mode: Mode) -> Policy:
        no_steps = CostCurve({1: 1e-9})
        return policy(settings, lambda: costs.passes(mode), lambda: costs.step_s.curve if has_drafter else no_steps)

    return SharedDrafting(policy_for, costs.step_s, memory or drafter_memory(), recent)


def drafter_memory() -> DrafterMemory:
    """Return the memory for the keys of one target's drafters."""
    return DrafterMemory(_DRAFTER_IDS)


def proposer(
    settings: DecodeSettings,
    tokenizers: Vocabularies,
    shared: SharedDrafting,
    model: DraftModel,
    ngrams: NgramCache,
    fleet: FleetMemory | None = None,
    factors: LoadedFactors | None = None,
    *,
    is_external: bool = False,
) -> Proposer:
    """Return a proposer that drafts with the model and from memory. For an external engine the drafter uses no noise,
    since the engine's is unknown, and the memory is that of the text alone.

    Args:
        fleet: what the fleet said; None remembers nothing.
        factors: tenants with factors of their own over the model; None: there are none.
    """
    alignment = tokenizers.alignment if settings.splits else tokenizers.alignment.without_splits()
    drafter = Drafter(
        model,
        tokenizers.drafter,
        tokenizers.target.vocabulary,
        alignment,
        ngrams,
        NoiseCoupling((0.0,) if is_external else NOISE_WEIGHTS),
        shared.step_s.measured(model) if settings.policy == "cost" else None,
        SessionPool(shared.memory),
        factors,
        TokenHealing(tokenizers.drafter.vocabulary, tokenizers.target, alignment),
        extends_to_depth=is_external,
        max_read_s=None if is_external else MAX_PREFILL_S,
        rank=model.rank if isinstance(model, NativeDrafter) else rank_tokens,
    )
    memories = memory_sources(settings, tokenizers, shared.recent, fleet, is_external=is_external)
    if settings.policy == "acceptance" and not model.has_head:
        logger.info("this drafter has no acceptance head: its chains end by measured agreement")
    return TreeProposer((*memories, drafter), shared.policy_for, has_trees=settings.trees)


def memory_proposer(
    settings: DecodeSettings,
    tokenizers: TargetVocabulary,
    shared: SharedDrafting,
    fleet: FleetMemory | None = None,
) -> Proposer:
    """Return a proposer that drafts from memory alone."""
    sources = memory_sources(settings, tokenizers, shared.recent, fleet)
    return TreeProposer(sources, shared.policy_for, has_trees=settings.trees)


def memory_sources(
    settings: DecodeSettings,
    tokenizers: TargetVocabulary,
    recent: RecentTexts | None,
    fleet: FleetMemory | None = None,
    *,
    is_external: bool = False,
) -> tuple[DraftSource, ...]:
    """Return the sources that draft from a client's prediction and from earlier texts."""
    vocab_size = len(tokenizers.target.vocabulary)
    prediction = PredictionSource(vocab_size)
    if settings.suffix_memory and not is_external:
        return prediction, SuffixSource(vocab_size, recent or RecentTexts(0), fleet or no_fleet_memory)
    return (prediction, PromptLookup()) if settings.lookup else (prediction,)


def policy(
    settings: DecodeSettings, passes: Callable[[], CostCurve], steps: Callable[[], CostCurve], num_candidates: int = 4
) -> Policy:
    """Return a new policy of the kind that the settings name; only the one by costs asks for those of passes and of the
    drafter's steps."""
    match settings.policy:
        case "fixed":
            return FixedPolicy()
        case "acceptance":
            return AcceptancePolicy()
        case "threshold":
            return ThresholdPolicy()
        case "cost":
            return CostPolicy(passes(), steps(), num_candidates if settings.trees else 1)


_LONGEST_PROMPT_SHARE = 0.75
"""The share of the drafter's context that a prompt may fill; the rest is for the answer."""


def drafter_prompt(
    prompt_ids: Sequence[int], tokenizers: Vocabularies, context_limit: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the drafter's ids up to the last special token, and the target's ids after it, which the drafter reads as
    it reads the answer. Neither where the drafter cannot spell the prompt: it then reads the answer only."""
    longest, vocabulary = int(context_limit * _LONGEST_PROMPT_SHARE), tokenizers.target.vocabulary
    try:
        return map_prompt(prompt_ids, vocabulary, tokenizers.drafter, tokenizers.alignment, longest=longest)
    except VocabularyError:
        return (), ()


def costs_path(*facts: object) -> Path:
    """Return the file of costs that depend on these facts, the number of threads and the processor."""
    name = hashlib.sha256(repr((*facts, torch.get_num_threads(), processor())).encode()).hexdigest()[:24]
    return default_home() / "costs" / f"{name}.json"


def measured_costs(settings: Settings, loaded_target: Target) -> MeasuredCosts:
    """Return the costs of the target on this machine, kept in a file for the next start; they are measured at once for
    the default mode if the policy needs them."""
    file = CostFile(costs_path(loaded_target.fingerprint))
    costs = MeasuredCosts(loaded_target, file, _drafter_name(settings))
    if settings.decode.policy == "cost":
        costs.passes(settings.decode.mode)
    return costs


def _drafter_name(settings: Settings) -> str:
    return f"{settings.models.drafter} in {settings.models.drafter_precision}"


def costs_about(settings: Settings, loaded_target: Target) -> dict[str, str]:
    """Return of what measured costs are."""
    lines = processor().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), lines[0])
    return {
        "target": settings.models.target,
        "weights": loaded_target.fingerprint,
        "drafter": _drafter_name(settings),
        "processor": name,
    }


def drafter_of(proposer: Proposer) -> Drafter:
    """Return the drafter among the sources of a snapshot's proposer."""
    if isinstance(proposer, TreeProposer):
        for each in proposer.sources:
            if isinstance(each, Drafter):
                return each
    raise ContractError(f"a snapshot for batches has a drafter, got {proposer}")
