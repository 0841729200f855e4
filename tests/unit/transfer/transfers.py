"""Transfers of a tiny model, without names, files or a command line."""

from dataclasses import replace
from pathlib import Path

import torch

from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.hf.target_vocabulary import adopt_target_vocabulary
from omnidraft.models.hf.tokenizer import HfTokenizer
from omnidraft.models.hf.trainable_drafter import TransformersTrainable, trainable_with_embeddings
from omnidraft.transfer.bits_per_byte import bits_per_byte
from omnidraft.transfer.hypernetwork import LinearHypernetwork
from omnidraft.transfer.models import matrices
from omnidraft.transfer.original_model import OriginalModel
from omnidraft.transfer.settings import TrainingSettings
from omnidraft.transfer.texts import AlignedText, TextTokenizer, align_text
from omnidraft.transfer.trainer import Trainer
from omnidraft.vocab.alignment import align
from tests.tiny_pair import TEXTS

ALM = ("alm", 1.0)
SETTINGS = TrainingSettings(num_steps=6, texts_per_step=2, learning_rate=3e-3, warmup_steps=2)


class Transfer:
    """A model before and after, and texts for both."""

    def __init__(self, folder: Path, old: HfTokenizer, new: HfTokenizer, settings: TrainingSettings = SETTINGS) -> None:
        sides = TextTokenizer.of(old, [], "old"), TextTokenizer.of(new, [], "new")
        self.texts: list[AlignedText] = [align_text(text, *sides, settings.max_tokens) for text in TEXTS]
        before = causal_lm(folder, dtype=torch.float32).eval().requires_grad_(False)
        self.before = TransformersTrainable(before)
        self.original = OriginalModel(self.before, old.vocabulary, new.vocabulary, settings.alm)
        model = causal_lm(folder, dtype=torch.float32)
        alignment = align(old, new)
        networks = [LinearHypernetwork(each.clone(), alignment.drafts_of_target) for each in matrices(model)]
        if old.fingerprint != new.fingerprint:
            adopt_target_vocabulary(model, alignment, new.vocabulary)
        self.after = trainable_with_embeddings(model, train=settings.train, rank=4, seed=0, precision="float32")
        self.trainer = Trainer(self.after, self.original, self.texts, settings, networks)

    def bits(self) -> float:
        return bits_per_byte(self.after, self.texts, "new")


def steps(transfer: Transfer, num: int) -> None:
    for _ in range(num):
        transfer.trainer.step()


def learning(*losses: tuple[str, float], **more: object) -> TrainingSettings:
    return replace(SETTINGS, losses=losses, **more)  # type: ignore[arg-type]
