"""The drafts for one text at a time are, tree for tree, those of the recorded run, and so are the policy's numbers.

`python -m tests.unit.decode.drafting.test_golden_drafts` records the run again.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.policy.chain import AcceptancePolicy, FixedPolicy, ThresholdPolicy
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import CostCurve
from omnidraft.ports import DraftTree, Policy, RoundText, Sampling, TreeLimits
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from tests.unit.decode.toys import (
    DRAFT_PIECES,
    DRAFT_TOKENIZER,
    TARGET_PIECES,
    TARGET_TOKENIZER,
    Strict,
    T,
    make_drafter,
    make_request,
)

GOLDEN = Path(__file__).parents[2] / "golden/drafts.json"
NUM_STATES = 64
STEPPED = {1: 1.0, 2: 1.05, 4: 1.1, 5: 1.6, 8: 1.7, 16: 2.4}
POLICIES = {
    "fixed": FixedPolicy,
    "threshold": lambda: ThresholdPolicy(0.2),
    "acceptance": lambda: AcceptancePolicy(0.7),
    "cheap": lambda: CostPolicy(CostCurve({1: 1.0, 16: 1.2}), CostCurve({1: 0.03, 4: 0.035, 64: 0.4})),
    "stepped": lambda: CostPolicy(CostCurve(STEPPED), CostCurve({1: 0.05, 2: 0.06, 4: 0.09, 64: 1.0})),
    "dear": lambda: CostPolicy(CostCurve({1: 1.0, 2: 1.5, 16: 9.0}), CostCurve({1: 0.2, 4: 0.25, 64: 3.0})),
}
LIMITS = {"tree": TreeLimits(64), "chain": TreeLimits(5, 1), "two chains": TreeLimits(6, 2, 3)}


def target_table() -> ToyTable:
    return ToyTable.random(len(TARGET_PIECES), seed=11, order=1, num_states=NUM_STATES, spread=2.5)


def drafter_table() -> ToyTable:
    """What the target's table says of the same text, with errors."""
    errors = torch.randn(NUM_STATES, len(DRAFT_PIECES), generator=torch.Generator().manual_seed(5))
    logits = torch.full((NUM_STATES, len(DRAFT_PIECES)), -6.0) + errors
    target = target_table()
    for last, before in enumerate(DRAFT_PIECES):
        for token, piece in enumerate(DRAFT_PIECES):
            if before in T and piece in T:
                logits[last + 1, token] = target.logits([T[before]])[T[piece]] + errors[last + 1, token]
    return ToyTable(logits, order=1)


def numbers(policy: Policy) -> list[float]:
    """The state of the policy after the run."""
    if not isinstance(policy, CostPolicy):
        return []
    stats, plan = policy.streams.of("default"), policy.start_round([RoundText("default", 1)])
    tenant = (stats.gain, stats.emits, stats.num_drafted, policy.streams.payer("default").idle_s, stats.trials_left)
    numbers = (plan.rate, *tenant, policy.next_value, policy.length("default", "text").mean)
    return [float(f"{number:.9g}") for number in numbers]


def rows_of(tree: DraftTree) -> list[object]:
    sources = "".join(each.value[0] for each in tree.sources[1:] if each is not None)
    return [tree.tokens, tree.parents, sources, tree.draft_ids, tree.noise_weight]


def run(policy_name: str, temperature: float, limits_name: str) -> dict[str, object]:
    """Decode texts one after another. Each begins with other draft ids, so that no keys of an earlier one are used."""
    policy = POLICIES[policy_name]()
    acceptance = (lambda log_q: math.exp(log_q / 2)) if policy_name == "acceptance" else None
    proposer = make_drafter(drafter_table(), policy=policy, has_lookup=True, acceptance=acceptance)
    *others, drafter = proposer.sources
    proposer.sources = (*others, replace(drafter, noise_coupling=NoiseCoupling((0.0, 0.5, 1.0))))
    target = ToyTarget(target_table(), limits=LIMITS[limits_name])
    decoder = Decoder(target, TARGET_TOKENIZER.vocabulary, failures=Strict())
    texts, trees = [], []
    for seed, prompt in enumerate(["abc he.\n", "he abc", "ch. e", "gh ab"]):
        request = make_request(Sampling(temperature), seed=seed, num_draft_tokens=7, max_new_tokens=36 - 9 * seed)
        ids = tuple(TARGET_TOKENIZER.encode(prompt))
        request = replace(request, prompt_ids=ids, drafter_prompt_ids=tuple(DRAFT_TOKENIZER.encode(prompt)))
        steps = list(decoder.decode(request, proposer))
        texts.append([token for step in steps for token in step.emitted])
        trees += [rows_of(step.tree) for step in steps]
    log_q = sum(sum(step.tree.log_q) for step in steps)
    return {"texts": texts, "trees": trees, "log_q": round(log_q, 4), "policy": numbers(policy)}


CASES = [
    "fixed 0.0 chain",
    "threshold 1.0 tree",
    "acceptance 1.0 tree",
    "cheap 0.0 tree",
    "cheap 1.0 two chains",
    "stepped 1.0 tree",
    "stepped 0.0 chain",
    "dear 1.0 tree",
]


def run_case(case: str) -> dict[str, object]:
    policy, temperature, limits = case.split(" ", 2)
    return json.loads(json.dumps(run(policy, float(temperature), limits)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", CASES)
def test_drafts_and_policy_are_those_of_the_recorded_run(case: str) -> None:
    recorded, got = json.loads(GOLDEN.read_text())[case], run_case(case)
    assert got["texts"] == recorded["texts"]
    assert got["trees"] == recorded["trees"]
    assert got["log_q"] == pytest.approx(recorded["log_q"], abs=2e-4)
    assert got["policy"] == pytest.approx(recorded["policy"], rel=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({case: run_case(case) for case in CASES}, separators=(",", ":")) + "\n")
