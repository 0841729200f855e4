"""docs/scaling.md: its table is what the code computes, and events give the figures that the arithmetic gives."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from omnidraft.config import LearnerSettings, Settings
from pipelines import scaling
from pipelines.scaling_parts import simulation
from pipelines.scaling_parts.arithmetic import Fleet
from pipelines.scaling_parts.measured import Drafter, Measured, Traffic, recorded_traffic

NOTE = Path(__file__).parents[3] / "docs/scaling.md"
SIZES = [int(number) for number in scaling.SIZES.split(",")]
RANK = 32


@pytest.fixture(scope="module")
def measured() -> Measured:
    return Measured(recorded_traffic())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_the_note_shows_what_the_code_computes(measured: Measured, tmp_path: Path) -> None:
    copy = tmp_path / "scaling.md"
    copy.write_text(NOTE.read_text())
    scaling.put(copy, scaling.table([Fleet(number, measured) for number in SIZES]))
    assert copy.read_text() == NOTE.read_text()


@pytest.mark.parametrize("num_workers", SIZES)
def test_events_give_the_traffic_of_the_arithmetic(
    measured: Measured, num_workers: int, rng: np.random.Generator
) -> None:
    fleet = Fleet(num_workers, measured)
    seen = simulation.traces(num_workers, measured, fleet.partitions, rng)
    assert seen.records_per_s == pytest.approx(fleet.records_per_s, rel=0.02)
    assert seen.bytes_per_s == pytest.approx(fleet.log_bytes_per_s, rel=0.02)
    assert seen.busiest_partition_records_per_s < measured.partition_records_per_s * 0.6


@pytest.mark.parametrize("num_workers", SIZES)
def test_a_learner_that_falls_behind_learns_that_share_that_late(
    measured: Measured, num_workers: int, rng: np.random.Generator
) -> None:
    fleet = Fleet(num_workers, measured)
    seen = simulation.learner(fleet.records_per_s, measured, scaling.HOURS, rng)
    assert seen.share == pytest.approx(fleet.learned_share, rel=0.03)
    assert seen.mean_age_s == pytest.approx(fleet.learner_age_s, rel=0.05)


def test_a_learner_that_keeps_up_learns_all_at_once(rng: np.random.Generator) -> None:
    """Three workers; nobody waits but for the step before."""
    measured = Measured(recorded_traffic())
    fleet = Fleet(3, measured)
    assert fleet.learned_share == 1
    seen = simulation.learner(fleet.records_per_s, measured, 24, rng)
    assert seen.share == pytest.approx(1, rel=0.02)
    assert seen.mean_age_s < 60
    with pytest.raises(ValueError, match="keeps up"):
        _ = fleet.learner_age_s


def test_a_smaller_sample_is_learned_younger(measured: Measured) -> None:
    young = Settings(learner=LearnerSettings(lag_sample_records=200, max_lag_records=2000))
    assert Fleet(1000, replace(measured, settings=young)).learner_age_s < Fleet(1000, measured).learner_age_s / 9


@pytest.mark.parametrize("num_workers", SIZES)
@pytest.mark.parametrize("size", ["full_bytes", "lora_bytes"])
def test_downloads_that_share_a_server_take_what_the_arithmetic_says(
    measured: Measured, num_workers: int, size: str, rng: np.random.Generator
) -> None:
    """Beside the moment until a worker hears of it."""
    fleet = Fleet(num_workers, measured)
    seconds = simulation.fanout_s(num_workers, getattr(fleet, size), measured, rng)
    foretold = fleet.fanout_s(getattr(fleet, size))
    assert foretold * 0.999 <= seconds <= foretold + measured.fetch_wait_s


def test_the_drafters_sizes_are_those_of_the_model() -> None:
    sizes = Drafter()
    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        weights = sum(each.numel() for each in model.parameters())
        wrapped = peft.get_peft_model(
            model, peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        )
    assert sizes.num_weights == weights
    factors = sum(each.numel() for name, each in wrapped.named_parameters() if "lora" in name)
    assert sizes.num_factors(RANK) == factors


def test_twice_the_workers_are_twice_the_traffic_and_the_same_learner() -> None:
    traffic = Traffic(tokens=(100,), num_bytes=(1000,), compressed_share=0.5)
    one, two = (Fleet(number, Measured(traffic, worker_tokens_per_s=10)) for number in (100, 200))
    assert (one.tokens_per_s, one.records_per_s, one.log_bytes_per_s) == (1000, 10, 5000)
    assert two.log_bytes_kept == 2 * one.log_bytes_kept == 2 * 5000 * 72 * 3600 * 3
    assert (one.learned_share, two.learned_share) == (0.057, 0.0285)
    assert one.num_recorders == two.num_recorders == 57
    assert one.snapshot_interval_s == two.snapshot_interval_s
