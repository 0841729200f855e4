"""The acceptance head learns between the drafter's steps, and the drafter as if it were alone, bit for bit."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.distill.training.head import REJECTED_WEIGHT, HeadTrainer
from omnidraft.errors import ConfigError
from omnidraft.models.acceptance_head import PREFIX, AcceptanceHead
from omnidraft.models.hf.drafter import load_drafter
from omnidraft.traces.codec import no_rounds
from tests.tiny_pair import assert_same, records_of
from tests.unit.distill.drafted import RIGHT_LOG_Q, WRONG_LOG_Q, with_drafts

WAYS = pytest.mark.parametrize("train", ["full", "lora"])


@pytest.fixture
def fast_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnidraft.distill.training.head.LEARNING_RATE", 1e-2)


def drafted(pair, num: int, first: int = 0) -> list:
    return [with_drafts(pair, record, seed=first + n) for n, record in enumerate(records_of(pair, num, first))]


def build(pair, record) -> TrainingExample:
    return ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=128).build(record)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def of_head(learner) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in copies(learner.serving_tensors()).items() if name.startswith(PREFIX)}


def of_drafter(learner) -> dict[str, Tensor]:
    return copies({name: parameter.detach() for name, parameter in learner.model.trained().items()})


def is_same(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_drafter_learns_from_every_record_as_if_it_were_alone(pair) -> None:
    learner, alone = pair.learner(head=True), pair.learner()
    for first in (0, 4, 8, 12):
        head = of_head(learner)
        report, plain = learner.step(drafted(pair, 4, first)), alone.step(drafted(pair, 4, first))
        assert set(report.losses) == {*plain.losses, "head"}
        assert {name: report.losses[name] for name in plain.losses} == plain.losses
        assert is_same(of_drafter(learner), of_drafter(alone))
        assert not is_same(of_head(learner), head)


def test_the_head_learns_from_earlier_records_with_the_drafter_of_now(pair) -> None:
    """Records without drafted tokens teach the drafter; the head learns from the buffer."""
    learner = pair.learner(head=True, records_per_step=2)
    learner.step(drafted(pair, 2))
    head = of_head(learner)
    report = learner.step([replace(record, rounds=no_rounds()) for record in records_of(pair, 2, 20)])
    assert set(report.losses) == {"dm", "ngram", "head"}
    assert not is_same(of_head(learner), head)


def test_without_a_drafted_token_the_head_waits(pair) -> None:
    learner = pair.learner(head=True)
    records = [replace(record, rounds=no_rounds()) for record in records_of(pair, 2)]
    head = of_head(learner)
    reports = [learner.step(records) for _ in range(2)]
    assert [set(report.losses) for report in reports] == [{"dm", "ngram"}] * 2
    assert all(report.is_update for report in reports)
    assert is_same(of_head(learner), head)


def test_the_head_alone_can_be_refused_a_step_that_is_not_finite(pair) -> None:
    learner = pair.learner(head=True)
    weight = learner._head._trained[PREFIX + "out.weight"]
    handle = weight.register_hook(lambda grad: grad * float("nan"))
    head, drafter = of_head(learner), of_drafter(learner)
    report = learner.step(drafted(pair, 2))
    handle.remove()
    assert report.skipped["not_finite"] == 2
    assert is_same(of_head(learner), head)
    assert not is_same(of_drafter(learner), drafter)


def test_without_a_head_drafts_in_records_change_nothing(pair) -> None:
    with_them, without = pair.learner(), pair.learner()
    with_them.step(drafted(pair, 4))
    without.step(records_of(pair, 4))
    assert_same(copies(with_them.state()), copies(without.state()))


def test_rejected_tokens_weigh_more(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all drafted tokens look the same, the best constant is y / (y + weight (1 - y)) for a mean label y."""
    learner, example = pair.learner(), build(pair, drafted(pair, 1)[0])
    head = AcceptanceHead(learner.model.hidden_size)
    monkeypatch.setattr("omnidraft.distill.training.head.LEARNING_RATE", 0.05)
    monkeypatch.setattr("omnidraft.distill.training.head.GRAD_CLIP", 100.0)
    trainer = HeadTrainer(head)
    monkeypatch.setattr(learner.model, "hidden", lambda texts: torch.zeros(len(texts.ids_R), head.hidden_size))
    example.acceptance.log_q_N[:] = -1.0
    for _ in range(200):
        trainer.gradients(learner.model, [example])
        trainer.optimizer.step()
    label = float(example.acceptance.label_N.mean())
    learned = head.logits(torch.zeros(1, head.hidden_size), torch.tensor([-1.0])).sigmoid().item()
    assert learned == pytest.approx(label / (label + REJECTED_WEIGHT * (1 - label)), abs=0.01)


def test_a_head_begins_where_a_snapshot_had_none_and_goes_on_where_it_had(pair) -> None:
    old, new = pair.learner(), pair.learner(head=True)
    old.step(drafted(pair, 2))
    new.load_state({name: tensor.clone() for name, tensor in old.state().items()})
    assert_same(of_drafter(new), of_drafter(old))
    new.step(drafted(pair, 2))
    fresh = pair.learner(head=True)
    fresh.start_from(new.serving_tensors())
    assert_same(of_head(fresh), of_head(new))
    fresh.start_from(old.serving_tensors())  # whoever goes back to before the head learns it anew
    assert_same(of_head(fresh), of_head(pair.learner(head=True)))
    new.load_state({name: tensor.clone() for name, tensor in old.state().items()})
    assert_same(of_head(new), of_head(fresh))
    with pytest.raises(ConfigError, match=r"decode\.policy"):
        pair.learner(head=True, head_blocks=2).load_state(new.state())


@pytest.mark.parametrize("part", ["state", "serving_tensors"])
def test_a_snapshot_of_which_only_the_head_does_not_fit_changes_nothing(pair, part) -> None:
    learner, other = pair.learner(head=True, head_blocks=2), pair.learner(head=True)
    learner.step(drafted(pair, 2))
    other.step(drafted(pair, 2, first=2))
    before, load = copies(learner.state()), learner.load_state if part == "state" else learner.start_from
    with pytest.raises(ConfigError):
        load(copies(getattr(other, part)()))
    assert_same(copies(learner.state()), before)


def test_a_worker_judges_drafted_tokens_as_the_learner_did(pair, fast_head) -> None:
    """What a served drafter says behind the texts of a record is what was learned, up to bfloat16 weights."""
    learner = pair.learner(head=True)
    records = drafted(pair, 3)
    for _ in range(30):
        learner.step(records)
    tensors = learner.serving_tensors()
    drafter = load_drafter(pair.folder, "float32", tensors, "full")
    example = build(pair, records[0])
    assert drafter.has_head
    acceptance_by_label = {True: [], False: []}
    for at, log_q in zip(example.acceptance.row_N, example.acceptance.log_q_N, strict=True):
        session = drafter.open()
        session.prefill_or_extend(0, example.ids_T[: at + 1].tolist())
        (acceptance,) = session.acceptance_probabilities()
        acceptance_by_label[bool(log_q == np.float32(RIGHT_LOG_Q))].append(acceptance(float(log_q)))
    assert {RIGHT_LOG_Q, WRONG_LOG_Q} == set(example.acceptance.log_q_N.tolist())
    assert min(acceptance_by_label[True]) > max(acceptance_by_label[False])
