"""Training by the model before: nothing to learn from oneself, right likelihoods, and runs that resume."""

from pathlib import Path

import numpy as np
import pytest
import torch

from omnidraft.distill.examples.chunks import AlmSettings
from omnidraft.errors import ConfigError
from omnidraft.transfer.hidden_loss import relative_distances
from omnidraft.transfer.run import Checkpoint, Point, train
from omnidraft.transfer.settings import TrainingSettings
from tests.tiny_pair import Pair, assert_same, make_pair
from tests.unit.transfer.transfers import ALM, SETTINGS, Transfer, learning, steps


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model whose probabilities are far from even."""
    return make_pair(tmp_path_factory.mktemp("sharp"), tied=False, spread=0.3)


def test_a_model_with_its_own_tokenizer_has_nothing_to_learn(sharp: Pair) -> None:
    transfer = Transfer(sharp.folder, sharp.draft, sharp.draft, learning(ALM))
    losses, norm = transfer.trainer.gradients([transfer.original.example(text) for text in transfer.texts])
    assert set(losses) == {"alm", "hidden"}
    assert max(losses.values()) < 1e-6
    assert norm < 1e-3


@pytest.mark.parametrize("debias", [True, False])
def test_likelihoods_of_chunks_are_those_of_their_tokens_one_by_one(sharp: Pair, debias: bool) -> None:
    settings = learning(ALM, alm=AlmSettings(debias=debias, merge_below=0.01))
    transfer = Transfer(sharp.folder, sharp.draft, sharp.target, settings)
    text = transfer.texts[0]
    chunks = transfer.original.example(text).targets["chunk"]
    log_p_OV = torch.log_softmax(
        transfer.before.logits(transfer.before.hidden(_pass(text.old_ids_O))).detach(), dim=-1
    ).double()
    starts = [t for t, spelled in enumerate(sharp.draft.vocabulary.token_bytes) if spelled[:1] in b" \t\r\n"]
    old_of_new = dict(zip(text.new_at_P.tolist(), text.old_at_P.tolist(), strict=True))
    assert len(chunks) > 3
    for row, num, log_p in zip(chunks.row_N, chunks.num_ids_N, chunks.log_p_N, strict=True):  # type: ignore[union-attr]
        first, end = old_of_new[int(row)], old_of_new[int(row + num)]
        expected = sum(log_p_OV[at, text.old_ids_O[at + 1]].item() for at in range(first, end))
        if debias:
            expected += log_p_OV[end, starts].logsumexp(dim=-1).item()
        assert log_p == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_equals_an_uninterrupted_one(sharp: Pair, tmp_path: Path, kind: str) -> None:
    settings = learning(ALM, ("nll", 0.1), train=kind)
    whole, first, second = (Transfer(sharp.folder, sharp.draft, sharp.target, settings) for _ in range(3))
    checkpoint = Checkpoint(tmp_path / "parts" / "checkpoint", {"seed": 0})
    steps(whole, SETTINGS.num_steps)
    steps(first, 2)
    checkpoint.save(first.trainer, [Point(2, 9, 3.0)])
    assert checkpoint.load(second.trainer) == [Point(2, 9, 3.0)]
    steps(second, SETTINGS.num_steps - 2)
    assert_same(second.trainer.state(), whole.trainer.state())
    assert any("embed_tokens" in name for name in whole.after.trained())


def test_a_checkpoint_of_another_run_is_refused(sharp: Pair, tmp_path: Path) -> None:
    transfer = Transfer(sharp.folder, sharp.draft, sharp.target)
    file = tmp_path / "checkpoint"
    Checkpoint(file, {"seed": 0}).save(transfer.trainer, [])
    with pytest.raises(ConfigError, match="seed was 0, is 1"):
        Checkpoint(file, {"seed": 1}).load(transfer.trainer)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="no checkpoint"):
        Checkpoint(file, {"seed": 0}).load(transfer.trainer)
    assert Checkpoint(tmp_path / "none", {}).load(transfer.trainer) == []


def test_what_the_model_before_has_learned_is_learned_with_the_new_tokenizer(sharp: Pair, tmp_path: Path) -> None:
    """Bits per byte fall from those of the initialisation towards those of the model before."""
    settings = learning(("nll", 1.0), num_steps=40, texts_per_step=3, learning_rate=1e-2, hidden_weight=0.0)
    teacher = Transfer(sharp.folder, sharp.draft, sharp.draft, settings)
    steps(teacher, 40)
    before = teacher.bits()
    learned = tmp_path / "learned"
    teacher.after.into_model().save_pretrained(learned)
    student = Transfer(learned, sharp.draft, sharp.target, learning(ALM, num_steps=30, texts_per_step=3))
    curve = train(
        student.trainer,
        Checkpoint(tmp_path / "checkpoint", {}),
        student.bits,
        num_steps=30,
        measure_every=10,
        on_point=lambda point: None,
    )
    assert [point.step for point in curve] == [0, 10, 20, 30]
    assert curve[0].bits_per_byte > 1.5 * before
    assert curve[-1].bits_per_byte < (curve[0].bits_per_byte + before) / 2


def test_the_hidden_states_pull_as_hard_as_the_likelihoods(sharp: Pair) -> None:
    """Their weight is relative, so the loss's own size does not matter."""
    norms = []
    for weight in (0.0, 1.0, 1000.0):
        transfer = Transfer(sharp.folder, sharp.draft, sharp.target, learning(ALM, hidden_weight=weight))
        norms.append(transfer.trainer.gradients([transfer.original.example(transfer.texts[0])])[1])
    assert norms[0] < norms[1] < norms[2] / 50
    assert relative_distances(torch.ones(1, 4), torch.zeros(1, 4)).item() == 1.0


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_rate_that_is_found_follows_the_size_of_the_layers_matrices(scale: float) -> None:
    layers = {
        "norm": torch.full((4,), 50.0),
        "up": torch.full((4, 4), 0.2 * scale),
        "down": torch.full((4, 4), -0.2 * scale),
    }
    assert TrainingSettings(num_steps=1).highest_rate(layers) == pytest.approx(3.2e-4 * scale)
    assert TrainingSettings(num_steps=1, train="lora").highest_rate(layers) == 1e-4
    assert TrainingSettings(num_steps=1, learning_rate=3e-4).highest_rate(layers) == 3e-4


def test_a_model_learns_at_the_rate_that_was_found_for_it_also_when_it_is_resumed(sharp: Pair) -> None:
    settings = learning(ALM, learning_rate=None)
    whole, first, second = (Transfer(sharp.folder, sharp.draft, sharp.target, settings) for _ in range(3))
    rates = [whole.trainer.step().learning_rate for _ in range(4)]
    layers = {name: each for name, each in first.after.trained().items() if len(each) != first.after.vocab_size}
    assert max(rates) == settings.highest_rate(layers)
    steps(first, 2)
    second.trainer.load_state(first.trainer.state())
    assert [second.trainer.step().learning_rate for _ in range(2)] == rates[2:]


def _pass(ids_T: np.ndarray):
    from omnidraft.ports import PackedTexts

    return PackedTexts(torch.from_numpy(ids_T), torch.zeros(len(ids_T), dtype=torch.int64), torch.arange(len(ids_T)), 0)
