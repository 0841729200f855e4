"""The contract of every target: the toy, transformers, and llama.cpp where it is installed."""

import pytest
import torch

from omnidraft.decode.decoder import Decoder
from omnidraft.errors import ContractError, RequestError
from omnidraft.models.ensemble import EnsembleTarget
from omnidraft.models.native.target import NativeTarget
from omnidraft.ports import DraftTree, Proposer, Request, Sampling, Target
from omnidraft.testing.toy_models import ToyTable, ToyTarget
from omnidraft.vocab.tokenizer import Vocabulary
from tests.unit.decode.toys import RandomTrees, emitted
from tests.unit.models.hf.test_chain_target import target as recurrent_target
from tests.unit.models.random_trees import OracleProposer
from tests.unit.models.tiny import VOCAB_SIZE, text, tiny_model, tiny_target
from tests.unit.models.tiny_llamacpp import tiny_llamacpp_target

TARGETS = {
    "toy": lambda: ToyTarget(ToyTable.random(VOCAB_SIZE, seed=1), context_limit=256),
    "llama": lambda: tiny_target("llama"),
    "native qwen2": lambda: NativeTarget(tiny_model("qwen2"), name="qwen2", precision="packed16"),
    "gemma3 packed16": lambda: tiny_target("gemma3", "packed16"),
    "qwen3.5": lambda: recurrent_target("Qwen3.5"),
    "llama.cpp": tiny_llamacpp_target,
    "ensemble": lambda: EnsembleTarget([tiny_target("llama"), tiny_target("gemma3", "packed16")]),
}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}
MODES = ["fast", "reproducible"]
VOCABULARY = Vocabulary(tuple(b"%d " % token for token in range(VOCAB_SIZE)), {}, frozenset())


@pytest.fixture(scope="module", params=TARGETS)
def target(request) -> Target:
    return TARGETS[request.param]()


def tree(tokens, parents) -> DraftTree:
    return DraftTree(tuple(tokens), tuple(parents), (None,) * len(tokens), (0.0,) * len(tokens))


def hostile(target: Target, seed: int) -> Proposer:
    limits = target.limits("fast")
    return RandomTrees(seed, VOCAB_SIZE) if limits.num_chains != 1 else OracleProposer([], limits, VOCAB_SIZE, seed)


def with_side_branch(target: Target, root: int) -> tuple[DraftTree, tuple[int, ...]]:
    """A tree, or a chain where the target takes no other, and the path of a part of it."""
    has_branches = target.limits("fast").num_chains != 1
    return tree([root, 3, 4, 5], [0, 0, 0, 2] if has_branches else [0, 0, 1, 2]), (0, 2) if has_branches else (0, 1)


def after(target: Target, ids: list[int]) -> torch.Tensor:
    """Logits after a text, from a fresh session. [V]"""
    return target.open(ids, 1, "fast").score(DraftTree.empty(ids[-1]))[0]


def assert_same(logits_NV: torch.Tensor, expected_NV: torch.Tensor, mode: str) -> None:
    """Equal up to rounding; in reproducible mode in every bit."""
    if mode == "reproducible":
        assert torch.equal(logits_NV, expected_NV)
    else:
        torch.testing.assert_close(logits_NV, expected_NV, **CLOSE)


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
    drafted, _ = with_side_branch(target, prompt[-1])
    scores = target.open(prompt, 10, "fast").score(drafted)
    torch.testing.assert_close(scores[0], after(target, prompt), **CLOSE)
    torch.testing.assert_close(scores[1], after(target, [*prompt, 3]), **CLOSE)
    way = [4, 5] if drafted.parents[2] == 0 else [3, 4, 5]
    torch.testing.assert_close(scores[3], after(target, [*prompt, *way]), **CLOSE)


def test_only_what_was_kept_is_remembered(target):
    prompt = text(6)
    session = target.open(prompt, 20, "fast")
    drafted, path = with_side_branch(target, prompt[-1])
    session.score(drafted)
    session.keep(path)
    kept = [*prompt, drafted.tokens[path[-1]], 8]
    torch.testing.assert_close(session.score(tree([8], [0]))[0], after(target, kept), **CLOSE)


def test_a_prompt_that_is_empty_or_too_long_is_refused(target):
    for prompt, max_new_tokens in [((), 4), (text(250), 7)]:
        with pytest.raises(RequestError):
            target.open(prompt, max_new_tokens, "fast")


def test_a_request_that_just_fits_can_be_decoded_to_its_end(target):
    request = Request(tuple(text(236)), (), 20, Sampling(1.0), mode="fast")
    assert len(emitted(Decoder(target, VOCABULARY).decode(request, hostile(target, 1)))) == 20


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
    assert emitted(decoder.decode(request, hostile(target, 4))) == plain


def test_closing_twice_is_allowed(target):
    session = target.open(text(3), 4, "fast")
    session.close()
    session.close()


def test_opening_computes_nothing_and_scoring_reads_the_prompt(target):
    session = target.open(text(6), 9, "fast")
    assert (session.num_kept, session.num_unread) == (0, 5)
    session.score(DraftTree.empty(4))
    assert (session.num_kept, session.num_unread) == (5, 0)
    session.keep((0,))
    assert (session.num_kept, session.num_unread) == (6, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [7, 64])
def test_a_prompt_may_be_read_in_chunks_beside_other_texts(target, mode, chunk):
    prompt, other = text(90), text(40, seed=3)
    alone, whole = target.open(other, 99, mode), target.open(prompt, 9, mode).score(DraftTree.empty(7))
    running, reading = target.open(other, 99, mode), target.open(prompt, 9, mode)
    running.score(DraftTree.empty(other[-1]))
    alone.score(DraftTree.empty(other[-1]))
    while num_unread := reading.num_unread:
        running.keep((0,))
        alone.keep((0,))
        [logits] = target.forward([(running, DraftTree.empty(5))], [(reading, min(chunk, num_unread))])
        assert_same(logits, alone.score(DraftTree.empty(5)), mode)
        assert reading.num_unread == max(num_unread - chunk, 0)
    assert_same(reading.score(DraftTree.empty(7)), whole, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_text_is_scored_beside_others_as_alone(target, mode):
    prompts = [text(3 + 9 * seed, seed) for seed in range(8)]
    limits = target.limits(mode)
    sizes = [min(seed % 3, limits.num_nodes) for seed in range(8)]
    trees = [tree([5, *range(20, 20 + size)], [0, *range(size)]) for size in sizes]
    if limits.num_chains is None:
        trees[4] = tree([5, 2, 3, 4, 6], [0, 0, 0, 1, 2])
    expected = [target.open(ids, 9, mode).score(each) for ids, each in zip(prompts, trees, strict=True)]
    sessions = [target.open(ids, 9, mode) for ids in prompts]
    for session in sessions:
        if session.num_unread:
            target.forward([], [(session, session.num_unread)])
    for logits, alone in zip(target.forward(list(zip(sessions, trees, strict=True))), expected, strict=True):
        assert_same(logits, alone, mode)
    for session in sessions:
        session.keep((0,))
    after_root = target.forward([(session, DraftTree.empty(9)) for session in sessions])
    for ids, logits in zip(prompts, after_root, strict=True):
        torch.testing.assert_close(logits[0], after(target, [*ids[:-1], 5, 9]), **CLOSE)


@pytest.mark.parametrize("mode", MODES)
def test_reused_keys_are_those_that_would_be_computed(target, mode):
    first = text(90)
    prompt = [*first[:70], *text(20, seed=2)]
    source = target.open(first, 9, mode)
    source.score(DraftTree.empty(first[-1]))
    source.keep((0,))
    session = target.open(prompt, 9, mode)
    num_reused = target.reuse(session, source, 70)
    assert 0 <= num_reused <= 70
    assert (session.num_kept, session.num_unread) == (num_reused, 89 - num_reused)
    source.close()
    assert_same(session.score(DraftTree.empty(3)), target.open(prompt, 9, mode).score(DraftTree.empty(3)), mode)


def test_a_pass_that_names_a_session_twice_or_misses_a_prompt_is_refused(target):
    ready, unread = target.open(text(1), 9, "fast"), target.open(text(5), 9, "fast")
    one = DraftTree.empty(3)
    for trees, prompts in [
        ([(ready, one), (ready, one)], []),
        ([(unread, one)], []),
        ([(unread, one)], [(unread, 4)]),
        ([], [(unread, 5)]),
        ([], [(unread, 0)]),
    ]:
        with pytest.raises(ContractError):
            target.forward(trees, prompts)
    ready.score(one)
    ready.keep((0,))
    with pytest.raises(ContractError, match="already"):
        target.reuse(ready, unread, 1)


def test_more_ids_need_no_less_memory(target):
    for mode in ("fast", "reproducible"):
        small, middle, large = (target.kv_bytes(num, mode) for num in (1, 100, 5000))
        assert 0 < small <= middle < large
    assert target.max_rows >= 16
