"""Inside another engine, whose passes are seen only as they come, a start beside other load ends no drafting either; by
a virtual clock."""

import math
from functools import lru_cache

import pytest

from omnidraft.decode.drafting.acceptance_stats import NoiseCoupling
from omnidraft.decode.drafting.drafter import Drafter
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.external.request_options import RequestOptions
from omnidraft.decode.policy.cost import CostPolicy
from omnidraft.decode.policy.cost_model import StepCosts, guessed_passes
from omnidraft.vocab.alignment import align
from omnidraft.vocab.ngram_cache import NgramCache
from tests.unit.decode.external.engines import BatchingEngine, make_rounds, prompts
from tests.unit.decode.policy.machines import MACHINES, num_until, tables, timed_drafter, tokens_per_s, virtual_clock
from tests.unit.decode.toys import TARGET_TOKENIZER

STARTS = {
    "slow x10": ("pass step", 10, 0.0),
    "slow x10, longer": ("pass step", 10, 5.0),
    "slow steps x10": ("step", 10, 0.0),
    "slow passes x10": ("pass", 10, 5.0),
}
"""What is slower while steps are measured, how many times, and for how many seconds more."""


def decode(
    machine_name: str,
    num_texts: int,
    start: str | None = None,
    *,
    drafter_kind: str = "good",
    num_drafted: int | None = None,
) -> list[tuple[float, float]]:
    """Decode 1,000 tokens a text beside the start's load; return tokens a text and seconds of each round."""
    with virtual_clock(machine_name) as machine:
        slow, factor, more_s = STARTS.get(start, ("", 1, 0.0))
        end_s = math.inf
        machine.load = lambda what: factor if what in slow and machine.now_s < end_s else 1.0
        vocabulary, alignment = TARGET_TOKENIZER.vocabulary, align(TARGET_TOKENIZER, TARGET_TOKENIZER)
        target_table, drafter_table = tables(len(vocabulary), drafter_kind, order=8)
        model, step_s, pass_s = timed_drafter(machine, drafter_table), StepCosts(), guessed_passes()
        cache = NgramCache(alignment.fingerprint, vocabulary, vocabulary, 64)
        coupling, measured = NoiseCoupling((0.0,)), step_s.measured(model)
        drafter = Drafter(model, TARGET_TOKENIZER, vocabulary, alignment, cache, coupling, measured)
        rounds, _, _ = make_rounds(
            proposer=TreeProposer((drafter,), lambda mode: policy),
            policy=(policy := CostPolicy(pass_s, measured, num_candidates=1)),
            update_pass=lambda rows, seconds: step_s.observe_pass(pass_s, rows, seconds),
            clock=machine,
        )
        end_s = machine.now_s + more_s
        engine = BatchingEngine(
            rounds, target_table, clock=machine, pass_s=lambda rows: machine.seconds("pass", rows), max_seqs=num_texts
        )
        said, last_s = [], machine.now_s
        requests = [
            engine.ask(prompt, 128, RequestOptions(num_draft_tokens=num_drafted)) for prompt in prompts(8 * num_texts)
        ]
        while engine.running or engine.waiting:
            engine.step()
            num_emitted = sum(len(each.emitted) for each in requests) / num_texts
            said.append((num_emitted - sum(num for num, _ in said), machine.now_s - last_s))
            last_s = machine.now_s
        return said


@lru_cache
def quiet(machine_name: str, num_texts: int) -> list[tuple[float, float]]:
    return decode(machine_name, num_texts)


def check_recovery(machine_name: str, num_texts: int, start: str) -> None:
    good = quiet(machine_name, num_texts)
    rounds = decode(machine_name, num_texts, start)
    assert num_until(rounds, 0.9 * tokens_per_s(good[len(good) // 2 :])) <= 330


def test_drafting_pays_once_passes_were_seen():
    rounds = quiet("AVX-512", 1)
    assert tokens_per_s(rounds) > 1.15 / MACHINES["AVX-512"]["pass"][1]


@pytest.mark.parametrize("start", ["slow x10, longer", "slow steps x10"])
def test_a_start_beside_other_load_is_forgotten_within_330_tokens(start):
    check_recovery("AVX-512", 1, start)


@pytest.mark.long
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("num_texts", [1, 4])
@pytest.mark.parametrize("machine_name", ["AVX-512", "free rows"])
def test_every_start_is_forgotten_on_every_machine(machine_name, num_texts, start):
    check_recovery(machine_name, num_texts, start)


def test_rows_turn_out_dear():
    """They are taken to be cheap before any was seen."""
    plain = tokens_per_s(decode("AVX2", 4, num_drafted=0))
    assert tokens_per_s(decode("AVX2", 4)) >= 0.96 * plain


@pytest.mark.long
@pytest.mark.parametrize("machine_name", ["AVX-512", "AVX2"])
def test_a_bad_drafter_loses_little(machine_name):
    """Though a few rounds have to find out what rows cost."""
    plain = tokens_per_s(decode(machine_name, 1, num_drafted=0))
    assert tokens_per_s(decode(machine_name, 1, drafter_kind="sure and wrong")) >= 0.97 * plain
