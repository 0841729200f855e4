"""A tiny drafter of a family learns, and what it learned is loaded and drafts as it does in the learner."""

from pathlib import Path
from typing import Literal

import torch

from omnidraft.distill.training.tenant_factors import FactorPlan, serving_factors
from omnidraft.models.hf.drafter import load_drafter
from omnidraft.ports import PackedTexts, TrainableDrafter
from omnidraft.snapshots import bundle
from omnidraft.vocab.alignment import align
from tests.models.runs import TokenizerFiles
from tests.snapshot_folders import manifest
from tests.tiny_pair import TEXTS, Pair, save_tokenizer

_RANK, _STEPS = 2, 3


def drafter_pair(name: str, root: Path) -> Pair:
    """A drafter of a family with a larger vocabulary than its target's."""
    draft, target = save_tokenizer(root / "draft", 340, TEXTS[2:]), save_tokenizer(root / "target", 300, TEXTS[:2])
    files = TokenizerFiles(root / "draft", len(draft.vocabulary), draft.vocabulary.roles["eos"])
    return Pair(files.save_family(name, root / "drafter"), draft, target, align(draft, target))


def require_learning(pair: Pair, root: Path, train: Literal["full", "lora"]) -> None:
    """Learn, write a snapshot, and draft from it, with a tenant's factors and without."""
    plan = FactorPlan(_RANK, _STEPS, learning_rate=3e-2)
    learner = pair.learner(train=train, learning_rate=3e-2, factor_tenants=1, factor_plan=plan)
    for number in range(_STEPS):
        learner.step([pair.record(f"{number}", TEXTS[number % 3], seed=number, tenant="a")])
    parts = {bundle.DRAFTER: learner.serving_tensors()}
    bundle.write(root / train, manifest(train=train), parts)
    tensors = bundle.serving_tensors(root / train)
    assert tensors is not None
    ids = pair.draft.encode(TEXTS[0])  # longer than windows
    base = load_drafter(pair.folder, "float32", None, train)
    drafter = load_drafter(pair.folder, "float32", tensors, train)
    with learner.serving(tensors):
        factors = serving_factors(learner.factors.fit("a", _STEPS)).tensors
        learned = _logits(learner.model, ids)
        with learner.model.factored(factors):
            of_tenant = _logits(learner.model, ids)
    before = base.open().prefill_or_extend(0, ids)
    _require_same(drafter.open().prefill_or_extend(0, ids), learned, before)
    _require_same(drafter.with_factors(factors)().prefill_or_extend(0, ids), of_tenant, learned)


def _require_same(drafts: torch.Tensor, learned: torch.Tensor, before: torch.Tensor) -> None:
    """Require what was learned, and that it is more than before by more than rounding."""
    changed = (learned - before).abs().max()
    assert changed > 0.05
    assert (drafts - learned).abs().max() < 0.02 * max(changed, learned.std())


@torch.no_grad()
def _logits(model: TrainableDrafter, ids: list[int]) -> torch.Tensor:
    zeros_R = torch.zeros(len(ids), dtype=torch.long)
    texts = PackedTexts(torch.tensor(ids), zeros_R, torch.arange(len(ids)), 0)
    return model.logits(model.hidden(texts))[-1].float()
