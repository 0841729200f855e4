"""Inside another engine, whose passes are seen only as they come, a start beside other load ends no drafting either; by
a virtual clock."""

import math

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


def decode(
    machine_name: str,
    num_texts: int,
    *,
    slow_for_s: float = -1.0,
    drafter_kind: str = "good",
    num_drafted: int | None = None,
) -> list[tuple[float, float]]:
    """Decode 1,000 tokens a text; return tokens a text and seconds of each round. While steps are measured, and so many
    seconds more, everything takes ten times as long; with -1 nothing does."""
    with virtual_clock(machine_name) as machine:
        end_s = math.inf if slow_for_s >= 0 else 0.0
        machine.load = lambda what: 10.0 if machine.now_s < end_s else 1.0
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
        end_s = machine.now_s + slow_for_s
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


def test_drafting_pays_once_passes_were_seen_and_a_start_beside_other_load_is_forgotten_within_330_tokens():
    quiet = decode("AVX-512", 1)
    assert tokens_per_s(quiet) > 1.15 / MACHINES["AVX-512"]["pass"][1]
    good = tokens_per_s(quiet[len(quiet) // 2 :])
    assert num_until(decode("AVX-512", 1, slow_for_s=5.0), 0.9 * good) <= 330


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
