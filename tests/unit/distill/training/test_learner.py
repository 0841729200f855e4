"""The learner learns, says what it did, and a resumed run is the uninterrupted one, bit for bit."""

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from omnidraft.distill.evaluation.agreement import block_efficiency, first_candidate_matches, share
from omnidraft.distill.examples.training_example import ExampleBuilder, TrainingExample
from omnidraft.distill.training.losses import LOSSES
from omnidraft.distill.training.step_report import StepReport, mean_losses
from omnidraft.errors import ConfigError, ModelError, SnapshotCorrupt
from omnidraft.models.hf import trainable_drafter
from omnidraft.models.hf.serving_tensors import apply_serving_tensors
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.ports import PackedTexts
from tests.tiny_pair import assert_same, records_of

WAYS = pytest.mark.parametrize("train", ["full", "lora"])


@pytest.mark.parametrize(("loss", "train"), [*((loss, "full") for loss in LOSSES), ("dm + 0.2 ngram", "lora")])
def test_every_loss_falls_on_repeated_records(pair, train, loss) -> None:
    learner = pair.learner(loss=loss, train=train, learning_rate=1e-2)
    reports = [learner.step(records_of(pair, 4)) for _ in range(8)]
    for name in reports[0].losses:
        assert reports[-1].losses[name] < reports[0].losses[name]
    assert all(report.is_update for report in reports)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_learning_raises_agreement_on_what_was_learned(pair, precision) -> None:
    learner, records = pair.learner(learning_rate=1e-2, precision=precision), records_of(pair, 3)
    before = learner.agreement(records)
    for _ in range(40):
        learner.step(records)
    assert before is not None
    assert before < 0.2
    assert learner.agreement(records) > 0.8


def test_a_step_teaches_the_cache_the_merges_that_were_emitted(pair) -> None:
    learner = pair.learner()
    (record,) = records_of(pair, 1)
    learner.step([record])
    builder = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=128)
    ngrams = builder.build(record).ngrams
    assert ngrams
    assert all(learner.cache.lookup(ngram.draft_ids) == ngram.target_id for ngram in ngrams)


@pytest.mark.parametrize("mode", ["frozen", "off"])
def test_a_cache_that_is_not_online_stays_as_it_was_while_the_weights_learn(pair, mode) -> None:
    learner = pair.learner()
    learner.step(records_of(pair, 1))
    before, learner.cache.mode = learner.cache.to_arrays(), mode
    assert learner.step(records_of(pair, 3, first=1)).is_update
    assert all((learner.cache.to_arrays()[name] == before[name]).all() for name in before)


def test_replay_keeps_what_new_records_would_overwrite(pair) -> None:
    """Two texts that contradict each other, one tenant after the other."""
    first, then = (
        replace(pair.record(f"{tenant}{seed}", text, seed=seed), tenant=tenant)
        for tenant, text, seed in (("old", "the sea is a big river. ", 1), ("new", "the sea is a big desert, no. ", 2))
    )
    agreement = {}
    for replay_records in (0, 1):
        learner = pair.learner(learning_rate=1e-2, replay_records=replay_records)
        for _ in range(20):
            learner.step([first])
        for _ in range(40):
            report = learner.step([then])
        assert (report.num_records, report.num_replayed) == (1, replay_records)
        assert report.num_tokens == len(then.emitted_ids)
        agreement[replay_records] = learner.agreement([first])
    assert agreement[1] > agreement[0] + 0.1
    assert agreement[1] > 0.9


@pytest.mark.parametrize(
    ("train", "replay_records", "precision"), [("full", 2, "float32"), ("full", 0, "float32"), ("lora", 2, "bfloat16")]
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    any_pair, train, replay_records, precision, monkeypatch
) -> None:
    monkeypatch.setattr("omnidraft.distill.training.learner.REPLAY_CAPACITY", 6)
    options = {"train": train, "replay_records": replay_records}
    options["precision"] = precision
    whole = any_pair.learner(**options)
    for first in (0, 4, 8, 12):
        whole.step(records_of(any_pair, 4, first))
    killed = any_pair.learner(**options)
    for first in (0, 4):
        killed.step(records_of(any_pair, 4, first))
    saved = {name: tensor.clone() for name, tensor in killed.state().items()}
    resumed = any_pair.learner(**options)
    resumed.load_state(saved)
    resumed.counters = replace(killed.counters)  # which a manifest has
    resumed.cache = any_pair.load_cache(killed.cache.to_arrays())
    for first in (8, 12):
        resumed.step(records_of(any_pair, 4, first))
    assert_same(resumed.state(), whole.state())
    arrays = whole.cache.to_arrays()
    assert all((resumed.cache.to_arrays()[name] == arrays[name]).all() for name in arrays)


@pytest.mark.parametrize(("began", "chosen"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_resumed_run_keeps_its_precision_unless_one_is_set(pair, monkeypatch, began, chosen) -> None:
    """On a machine whose own choice may be another."""
    state = pair.learner(precision=began).state()
    monkeypatch.setattr(trainable_drafter, "automatic_precision", lambda: chosen)
    for setting, expected in (("auto", began), ("float32", "float32"), ("bfloat16", "bfloat16")):
        resumed = pair.learner(precision=setting)
        resumed.load_state(state)
        assert resumed.model.precision == expected


def test_state_of_other_weights_is_refused(pair) -> None:
    with pytest.raises(ConfigError, match=r"learner\.train"):
        pair.learner(train="full").load_state(pair.learner(train="lora").state())


def test_a_step_that_is_not_finite_changes_no_weight_and_is_counted(pair) -> None:
    learner = pair.learner()
    learner.step(records_of(pair, 2))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    weight = next(iter(learner.model.trained().values()))
    handle = weight.register_hook(lambda grad: grad * float("nan"))
    report = learner.step(records_of(pair, 2))
    handle.remove()
    after = learner.state()
    assert_same(after, before)
    assert not report.is_update
    assert learner.counters.skipped["not_finite"] == 2
    assert learner.step(records_of(pair, 2)).is_update


def test_without_log_probabilities_only_emitted_ngrams_are_learned(pair) -> None:
    record = replace(records_of(pair, 1)[0], beliefs=None)
    report = pair.learner().step([record])
    assert set(report.losses) == {"ngram"}
    assert report.skipped["without_beliefs"] == 1


def test_hard_tokens_alone_teach(pair) -> None:
    """A target behind an API gives no log-probabilities."""
    records = [replace(record, beliefs=None) for record in records_of(pair, 4)]
    learner = pair.learner(loss="nll + 0.2 ngram", learning_rate=1e-2)
    reports = [learner.step(records) for _ in range(8)]
    assert set(reports[0].losses) == {"nll", "ngram"}
    assert all(reports[-1].losses[name] < 0.8 * reports[0].losses[name] for name in ("nll", "ngram"))
    assert learner.counters.skipped["without_beliefs"] == 32


def test_hard_tokens_have_no_positions_for_losses_on_log_probabilities(pair) -> None:
    record = replace(records_of(pair, 1)[0], beliefs=None)
    soft = [name for name, loss in LOSSES.items() if loss.positions not in ("emitted", "piece")]
    report = pair.learner(loss=" + ".join(["nll", *soft])).step([record])
    assert set(report.losses) == {"nll"}
    assert len(soft) == len(LOSSES) - 2


def test_nothing_to_learn_is_no_update(pair) -> None:
    record = replace(records_of(pair, 1)[0], beliefs=None)
    report = pair.learner(loss="dm").step([record])
    assert (report.losses, report.is_update) == ({}, False)


class Oracle:
    """A drafter that is certain of given next tokens: ports.TrainableDrafter as far as agreement uses it."""

    precision = "float32"

    def __init__(self, vocab_size: int, next_T: Tensor) -> None:
        self.vocab_size, self._next_T = vocab_size, next_T

    def hidden(self, texts: PackedTexts) -> Tensor:
        return self._next_T[texts.position_R[texts.num_context :], None].float()

    def logits(self, hidden_NH: Tensor) -> Tensor:
        return 20.0 * torch.nn.functional.one_hot(hidden_NH[:, 0].long(), self.vocab_size).float()


def test_a_drafter_that_knows_the_next_draft_token_agrees_everywhere(pair) -> None:
    """Direct tokens, the end of the text by role, and merges by their pieces; a split token's first target token is
    the first candidate too."""
    builder = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=128)
    example = builder.build(pair.record(text="The water of the river. Where does the river go?"))
    next_T = torch.cat([torch.from_numpy(example.ids_T[1:]), torch.tensor([pair.draft.vocabulary.roles["eos"]])])
    knows, knows_not = (Oracle(pair.alignment.num_draft, ids) for ids in (next_T, torch.zeros_like(next_T)))
    found = [first_candidate_matches(model, [example], pair.alignment) for model in (knows, knows_not)]
    (all_P,), (none_P,) = found
    assert len(all_P) == len(none_P) == len(example.at_P)
    assert all_P.all()
    assert not none_P.any()
    assert len(example.piece_at_M) > 0


def test_a_merge_with_one_wrong_piece_does_not_agree(pair) -> None:
    builder = ExampleBuilder(pair.draft, pair.target.vocabulary, pair.alignment, max_tokens=128)
    example = builder.build(pair.record(text="The water of the river."))
    next_T = torch.cat([torch.from_numpy(example.ids_T[1:]), torch.tensor([pair.draft.vocabulary.roles["eos"]])])
    next_T[example.piece_at_M[0] + 1] = 0
    (hits_P,) = first_candidate_matches(Oracle(pair.alignment.num_draft, next_T), [example], pair.alignment)
    assert hits_P.sum() == len(hits_P) - 1


def test_a_record_without_any_draft_token_has_no_position_alone_or_beside_others(pair) -> None:
    none = np.zeros(0, np.int64)
    empty = TrainingExample.of_text(none, none, none, {})
    learner = pair.learner()
    example = learner.read(pair.record(text="The water of the river."))
    for examples in ([empty], [empty, empty, example], [example, empty]):
        hits = first_candidate_matches(learner.model, examples, pair.alignment)
        assert [len(each) for each in hits] == [len(each.at_P) for each in examples]


def test_the_mean_of_losses_leaves_out_what_is_no_number() -> None:
    def report(**losses: float) -> StepReport:
        return StepReport(losses, 1.0, 1, 0, 1, is_update=True, skipped={}, duration_s=1.0)

    assert mean_losses([report(dm=float("nan"), head=1.0), report(dm=2.0, head=3.0)]) == {"dm": 2.0, "head": 2.0}
    assert mean_losses([report(dm=float("inf"), head=1.0)]) == {"head": 1.0}


def test_agreement_of_nothing_is_none() -> None:
    assert share([]) is None
    assert share([np.array([True, False, False]), np.array([True, True, False])]) == 0.5


@given(hits=st.lists(st.lists(st.booleans(), max_size=40), min_size=1, max_size=4), depth=st.integers(1, 9))
def test_block_efficiency_is_what_chains_of_first_candidates_would_give(hits, depth) -> None:
    passes_needed = 0
    for row in hits:
        left = list(row)
        while left:
            passes_needed += 1
            for _ in range(depth):  # drafted tokens, then the one that the target adds
                if not left or not left.pop(0):
                    break
            else:
                left = left[1:]
    total = sum(map(len, hits))
    expected = total / passes_needed if passes_needed else None
    assert block_efficiency([np.array(row, bool) for row in hits], depth) == expected


def test_merges_count_only_where_the_cache_knows_them(pair) -> None:
    learner = pair.learner(learning_rate=1e-2)
    record = pair.record(text="The water of the river.")
    for _ in range(40):
        learner.step([record])
    (knows,) = learner.hits([record], with_cache=True)
    learner.cache = pair.cache()
    (knows_not,) = learner.hits([record], with_cache=True)
    (without_cache,) = learner.hits([record])
    assert (knows == without_cache).all()
    assert knows_not.sum() < knows.sum()


@WAYS
def test_serving_tensors_give_a_worker_the_learned_drafter(any_pair, train) -> None:
    learner = any_pair.learner(train=train, learning_rate=1e-2)
    for _ in range(3):
        learner.step(records_of(any_pair, 2))
    served = LlamaForCausalLM.from_pretrained(any_pair.folder, dtype=torch.float32).eval()
    ids_BT = torch.arange(20)[None]
    base = served(ids_BT).logits.detach()
    apply_serving_tensors(served, learner.model.serving_tensors(), train=train)
    with torch.no_grad(), learner.serving(learner.model.serving_tensors()):
        texts = PackedTexts(ids_BT[0], torch.zeros_like(ids_BT[0]), torch.arange(20), 0)
        learned = learner.model.logits(learner.model.hidden(texts))
        torch.testing.assert_close(served(ids_BT).logits[0], learned, atol=1e-4, rtol=1e-4)
    assert (learned - base[0]).abs().max() > 1e-2


@WAYS
def test_measuring_with_serving_tensors_leaves_the_masters_as_they_were(pair, train) -> None:
    learner = pair.learner(train=train)
    learner.step(records_of(pair, 2))
    before = {name: tensor.clone() for name, tensor in learner.state().items()}
    with learner.serving(learner.model.serving_tensors()):
        pass
    assert_same(learner.state(), before)


def test_tensors_of_another_drafter_change_nothing(any_pair) -> None:
    served = LlamaForCausalLM.from_pretrained(any_pair.folder, dtype=torch.float32)
    before = {name: parameter.detach().clone() for name, parameter in served.named_parameters()}
    full = any_pair.learner(train="full").model.serving_tensors()
    lora = any_pair.learner(train="lora").model.serving_tensors()
    last, factor = max(full), min(lora)
    wrong = [
        ({**full, last: full[last][:1]}, "full"),
        ({name: full[name] for name in full if name != last}, "full"),
        ({**lora, "model.norm.lora_A.weight": torch.zeros(4, 32)}, "lora"),
        ({**lora, factor: lora[factor][:3]}, "lora"),
        (full, "lora"),
    ]
    for tensors, train in wrong:
        with pytest.raises(SnapshotCorrupt):
            apply_serving_tensors(served, tensors, train=train)
    assert_same(dict(served.named_parameters()), before)


def test_the_seed_alone_decides_the_first_lora_factors(pair) -> None:
    factors = [load_trainable(pair.folder, train="lora", rank=4, seed=seed).serving_tensors() for seed in (3, 3, 4)]
    assert_same(factors[0], factors[1])
    assert any(not torch.equal(factors[0][name], factors[2][name]) for name in factors[0])


def test_a_folder_without_a_model_is_refused(tmp_path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        load_trainable(tmp_path, train="full", rank=4, seed=0)


def test_a_record_is_never_longer_than_the_drafters_context(pair) -> None:
    learner = pair.learner(max_tokens=10_000)
    long = pair.record(emitted=pair.target.encode("The water of the river goes. " * 200))
    assert len(learner.read(long).ids_T) == learner.model.context_limit == 512
    assert learner.step([long]).is_update


@WAYS
def test_the_weights_of_a_learner_that_nobody_holds_are_freed_at_once(pair, train) -> None:
    """Gigabytes that waited for the collection of cycles would be in the way of whoever decodes next."""
    learner = pair.learner(train=train, precision="bfloat16")
    learner.step(records_of(pair, 2))
    weights = [weakref.ref(weight) for weight in learner.model.trained().values()]
    gc.disable()
    try:
        del learner
        assert not [weight for weight in weights if weight() is not None]
    finally:
        gc.enable()
