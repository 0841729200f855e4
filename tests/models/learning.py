"""A tiny drafter of a family learns, and what it learned is loaded and drafts as it does in the learner."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from omnidraft.distill.training.tenant_factors import FactorPlan, serving_factors
from omnidraft.errors import ConfigError
from omnidraft.models.hf.drafter import load_drafter
from omnidraft.ports import PackedTexts, TrainableDrafter
from omnidraft.snapshots import bundle
from omnidraft.vocab.alignment import align
from tests.models.runs import Row, TokenizerFiles
from tests.snapshot_folders import manifest
from tests.tiny_pair import TEXTS, Pair, save_tokenizer

ALL = ("full", "lora", "tenants")
_RANK, _STEPS = 2, 3


def drafter_pair(name: str, root: Path) -> Pair:
    """A drafter of a family with a larger vocabulary than its target's."""
    draft, target = save_tokenizer(root / "draft", 340, TEXTS[2:]), save_tokenizer(root / "target", 300, TEXTS[:2])
    files = TokenizerFiles(root / "draft", len(draft.vocabulary), draft.vocabulary.roles["eos"])
    return Pair(files.save_family(name, root / "drafter"), draft, target, align(draft, target))


def learn_family(row: Row, root: Path) -> None:
    """Let a drafter of a family learn, and note in the row what it can."""
    pair = drafter_pair(row.family, root)
    for what in ALL:
        with suppress(ConfigError):
            require_learning(pair, root, what)
            row.learns.append(what)


def require_learning(pair: Pair, root: Path, what: str) -> None:
    """Learn all weights, LoRA factors, or a tenant's factors beside all weights; write a snapshot, and draft from it.

    Raises:
        ConfigError: the drafter cannot learn so.
    """
    train, plan = "lora" if what == "lora" else "full", FactorPlan(_RANK, _STEPS, learning_rate=3e-2)
    options = {"factor_tenants": 1, "factor_plan": plan} if what == "tenants" else {}
    learner = pair.learner(train=train, learning_rate=3e-2, **options)
    for number in range(_STEPS):
        learner.step([pair.record(f"{number}", TEXTS[number % 3], seed=number, tenant="a")])
    bundle.write(root / what, manifest(train=train), {bundle.DRAFTER: learner.serving_tensors()})
    tensors = bundle.serving_tensors(root / what)
    assert tensors is not None
    ids = pair.draft.encode(TEXTS[0])  # longer than windows
    before = load_drafter(pair.folder, "float32", None, train).open().prefill_or_extend(0, ids)
    drafter = load_drafter(pair.folder, "float32", tensors, train)
    with learner.serving(tensors):
        learned = _logits(learner.model, ids).numpy()
        _require_same(drafter.open().prefill_or_extend(0, ids), learned, before)
        if what == "tenants":
            factors = serving_factors(learner.factors.fit("a", _STEPS)).tensors
            with learner.model.factored(factors):
                of_tenant = _logits(learner.model, ids).numpy()
            _require_same(drafter.with_factors(factors)().prefill_or_extend(0, ids), of_tenant, learned)


def _require_same(drafts: np.ndarray, learned: np.ndarray, before: np.ndarray) -> None:
    """Require what was learned, and that it is more than before by more than rounding."""
    changed = abs(learned - before).max()
    assert changed > 0.05
    assert abs(drafts - learned).max() < 0.02 * max(changed, learned.std(ddof=1))


@torch.no_grad()
def _logits(model: TrainableDrafter, ids: list[int]) -> torch.Tensor:
    zeros_R = torch.zeros(len(ids), dtype=torch.long)
    texts = PackedTexts(torch.tensor(ids), zeros_R, torch.arange(len(ids)), 0)
    return model.logits(model.hidden(texts))[-1].float()
