"""Everything that drafts for a target: models, memories, and the policy over all of them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from omnidraft.config import DecodeSettings
from omnidraft.ports import DraftModel, Mode, Policy, Proposer

if TYPE_CHECKING:
    from omnidraft.decode.drafting.loaded_factors import LoadedFactors
    from omnidraft.decode.drafting.session_pool import DrafterMemory
    from omnidraft.decode.drafting.suffix_source import FleetMemory
    from omnidraft.decode.drafting.tree_proposer import DraftSource
    from omnidraft.decode.policy.cost_model import MeasuredCosts, Seconds, StepCosts
    from omnidraft.memory.recent_texts import RecentTexts
    from omnidraft.vocab.ngram_cache import NgramCache
    from omnidraft.wiring.vocabularies import TargetVocabulary, Vocabularies

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
    step_s: "StepCosts"
    memory: "DrafterMemory"
    recent: "RecentTexts | None" = None
    """What the worker said lately; None remembers nothing."""


def shared_drafting(
    settings: DecodeSettings,
    costs: "MeasuredCosts",
    recent: "RecentTexts | None" = None,
    memory: "DrafterMemory | None" = None,
    *,
    has_drafter: bool = True,
) -> SharedDrafting:
    """Return policies, costs and memory for our own engine. A mode is measured when the policy first needs it."""
    from omnidraft.decode.policy.cost_model import CostCurve

    @cache
    def policy_for(mode: Mode) -> Policy:
        step_s = costs.step_s if has_drafter else CostCurve({1: 1e-9})  # nobody takes steps
        return policy(settings, lambda: costs.passes(mode), step_s)

    return SharedDrafting(policy_for, costs.step_s, memory or drafter_memory(), recent)


def drafter_memory() -> "DrafterMemory":
    """Return the memory for the keys of one target's drafters."""
    from omnidraft.decode.drafting.session_pool import DrafterMemory

    return DrafterMemory(_DRAFTER_IDS)


def proposer(
    settings: DecodeSettings,
    tokenizers: "Vocabularies",
    shared: SharedDrafting,
    model: DraftModel,
    ngrams: "NgramCache",
    fleet: "FleetMemory | None" = None,
    factors: "LoadedFactors | None" = None,
    *,
    is_external: bool = False,
    max_read_s: float | None = None,
) -> Proposer:
    """Return a proposer that drafts with the model and from memory. For an external engine the drafter uses no noise,
    since the engine's is unknown, and the memory is that of the text alone.

    Args:
        fleet: what the fleet said; None remembers nothing.
        factors: tenants with factors of their own over the model; None: there are none.
        max_read_s: see Drafter.
    """
    from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
    from omnidraft.decode.drafting.drafter import Drafter
    from omnidraft.decode.drafting.session_pool import SessionPool
    from omnidraft.decode.drafting.token_healing import TokenHealing
    from omnidraft.decode.drafting.tree_proposer import TreeProposer

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
        max_read_s=max_read_s,
    )
    memories = memory_sources(settings, tokenizers, shared.recent, fleet, is_external=is_external)
    if settings.policy == "acceptance" and not model.has_head:
        logger.info("this drafter has no acceptance head: its chains end by measured agreement")
    return TreeProposer((*memories, drafter), shared.policy_for, has_trees=settings.trees)


def memory_proposer(
    settings: DecodeSettings,
    tokenizers: "TargetVocabulary",
    shared: SharedDrafting,
    fleet: "FleetMemory | None" = None,
) -> Proposer:
    """Return a proposer that drafts from memory alone."""
    from omnidraft.decode.drafting.tree_proposer import TreeProposer

    sources = memory_sources(settings, tokenizers, shared.recent, fleet)
    return TreeProposer(sources, shared.policy_for, has_trees=settings.trees)


def memory_sources(
    settings: DecodeSettings,
    tokenizers: "TargetVocabulary",
    recent: "RecentTexts | None",
    fleet: "FleetMemory | None" = None,
    *,
    is_external: bool = False,
) -> "tuple[DraftSource, ...]":
    """Return the sources that draft from earlier texts."""
    from omnidraft.decode.drafting.prompt_lookup import PromptLookup
    from omnidraft.decode.drafting.suffix_source import SuffixSource, no_fleet_memory
    from omnidraft.memory.recent_texts import RecentTexts

    if settings.suffix_memory and not is_external:
        vocab_size = len(tokenizers.target.vocabulary)
        return (SuffixSource(vocab_size, recent or RecentTexts(0), fleet or no_fleet_memory),)
    return (PromptLookup(),) if settings.lookup else ()


def policy(
    settings: DecodeSettings, passes: "Callable[[], Seconds]", step_s: "Seconds", num_candidates: int = 4
) -> Policy:
    """Return a new policy of the kind that the settings name; only the one by costs asks for those of passes."""
    from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
    from omnidraft.decode.policy.cost import CostPolicy

    match settings.policy:
        case "fixed":
            return FixedPolicy()
        case "acceptance":
            return AcceptancePolicy()
        case "threshold":
            return ThresholdPolicy()
        case "cost":
            return CostPolicy(passes(), step_s, num_candidates if settings.trees else 1)
