"""The contract of every target: the toy, transformers, and llama.cpp where it is installed."""

import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import RequestError
from omnidraft.models.native.target import LlamaTarget
from omnidraft.ports import DraftTree, Request, Sampling, Target
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import RandomTrees, emitted
from tests.unit.models.tiny import VOCAB_SIZE, text, tiny_model, tiny_target
from tests.unit.models.tiny_llamacpp import tiny_llamacpp_target

TARGETS = {
    "toy": lambda: ToyTarget(ToyTable.random(VOCAB_SIZE, seed=1), context_limit=256),
    "llama": lambda: tiny_target("llama"),
    "native qwen2": lambda: LlamaTarget(tiny_model("qwen2"), name="qwen2", precision="packed16"),
    "gemma3 packed16": lambda: tiny_target("gemma3", "packed16"),
    "llama.cpp": tiny_llamacpp_target,
}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())


@pytest.fixture(params=TARGETS)
def target(request) -> Target:
    return TARGETS[request.param]()


def tree(tokens, parents) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))


def after(target: Target, ids: list[int]) -> torch.Tensor:
    """Logits after a text, from a fresh session. [V]"""
    return target.open(ids, 1, "fast").score(DraftTree.empty(ids[-1]))[0]


def test_it_says_how_large_it_is(target):
    assert target.vocab_size == VOCAB_SIZE
    assert target.context_limit == 256
    assert target.fingerprint


def test_scores_are_raw_float32_logits_one_row_a_node(target):
    scores = target.open(text(5), 10, "fast").score(tree([9, 3, 4], [0, 0, 1]))
    assert scores.shape == (3, VOCAB_SIZE)
    assert scores.dtype == torch.float32


def test_a_node_is_scored_after_its_own_ancestors(target):
    prompt = text(6)
    scores = target.open(prompt, 10, "fast").score(tree([prompt[-1], 3, 4, 5], [0, 0, 0, 2]))
    torch.testing.assert_close(scores[0], after(target, prompt), **CLOSE)
    torch.testing.assert_close(scores[1], after(target, [*prompt, 3]), **CLOSE)
    torch.testing.assert_close(scores[3], after(target, [*prompt, 4, 5]), **CLOSE)


def test_only_what_was_kept_is_remembered(target):
    prompt = text(6)
    session = target.open(prompt, 20, "fast")
    session.score(tree([prompt[-1], 3, 4, 5], [0, 0, 0, 2]))
    session.keep((0, 2))
    torch.testing.assert_close(session.score(tree([8], [0]))[0], after(target, [*prompt, 4, 8]), **CLOSE)


def test_a_prompt_that_is_empty_or_too_long_is_refused(target):
    for prompt, max_new_tokens in [((), 4), (text(250), 7)]:
        with pytest.raises(RequestError):
            target.open(prompt, max_new_tokens, "fast")


def test_a_request_that_just_fits_can_be_decoded_to_its_end(target):
    request = Request(tuple(text(236)), (), 20, Sampling(1.0), mode="fast")
    assert len(emitted(Decoder(target, VOCABULARY).decode(request, RandomTrees(1, VOCAB_SIZE)))) == 20


def test_two_sessions_do_not_disturb_each_other(target):
    prompt, other = text(6), text(8, seed=3)
    one, two = target.open(prompt, 9, "fast"), target.open(other, 9, "fast")
    one.score(DraftTree.empty(prompt[-1]))
    torch.testing.assert_close(two.score(DraftTree.empty(other[-1]))[0], after(target, other), **CLOSE)
    one.keep((0,))
    torch.testing.assert_close(one.score(DraftTree.empty(4))[0], after(target, [*prompt, 4]), **CLOSE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_tree_gives_the_text_of_plain_decoding(target, temperature):
    request = Request(tuple(text(9)), (), 16, Sampling(temperature), seed=3, mode="fast")
    decoder = Decoder(target, VOCABULARY)
    plain = emitted(decoder.decode(request, None))
    assert emitted(decoder.decode(request, RandomTrees(4, VOCAB_SIZE))) == plain


def test_closing_twice_is_allowed(target):
    session = target.open(text(3), 4, "fast")
    session.close()
    session.close()
