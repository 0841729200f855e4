"""Reproducible mode over trees of a real target: equal bits, and the self-test agrees."""

import numpy as np
import pytest
import torch

from omnidraft.models.catalog.store import resolve
from omnidraft.models.hf.padded_session import PassShape
from omnidraft.models.hf.target import TransformersTarget, load_target
from omnidraft.ports import DraftTree
from tests.unit.models.random_trees import random_tree, true_path

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@pytest.mark.parametrize("precision", ["auto", "bfloat16"])
def test_trees_give_a_real_target_the_bits_of_plain_decoding(precision: str) -> None:
    """50 positions of its own greedy text; in bfloat16 a row's bits depend on the width of its pass."""
    target = load_target(resolve("qwen2.5-coder-0.5b"), name="qwen2.5-coder-0.5b", precision=precision)
    if isinstance(target, TransformersTarget):
        target = TransformersTarget(target._model, PassShape(width=4), name="four", precision=precision)
    prompt, plain, following = list(range(1000, 1040)), [], []
    session = target.open(prompt, 60, "reproducible")
    for _ in range(50):
        plain.append(session.score(DraftTree.empty([prompt[-1], *following][-1]))[0])
        session.keep((0,))
        following.append(int(plain[-1].argmax()))
    rng, at, num_passes = np.random.default_rng(2), 0, 0
    session = target.open(prompt, 60, "reproducible")
    while at < 50:
        ids = following[at:49]
        draft = random_tree(rng, [prompt[-1], *following][at], ids, target.limits("reproducible"), target.vocab_size)
        nodes = true_path(draft, ids)
        assert torch.equal(session.score(draft)[nodes], torch.stack(plain[at : at + len(nodes)]))
        session.keep(nodes)
        at += len(nodes)
        num_passes += 1
    assert num_passes < 45
