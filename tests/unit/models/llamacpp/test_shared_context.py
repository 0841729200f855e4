"""Many texts in one llama.cpp context: one pass for all, room made and taken back, prefixes shared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.errors import ConfigError, ContractError, ModelError
from omnidraft.models.llamacpp import shared_context
from omnidraft.models.llamacpp.context import MAX_SEQUENCES, Context
from omnidraft.models.llamacpp.target import LlamaCppTarget
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import CLOSE, drafted
from tests.unit.models.tiny import text, tiny_model, whole_pass
from tests.unit.models.tiny_llamacpp import require_llamacpp, tiny_llamacpp_model, tiny_llamacpp_target

require_llamacpp()


@pytest.fixture
def passes(monkeypatch) -> list[int]:
    """Number of rows of every pass."""
    sizes: list[int] = []
    decode = Context._decode

    def counted(self, entries):
        sizes.append(len(entries))
        return decode(self, entries)

    monkeypatch.setattr(Context, "_decode", counted)
    return sizes


@pytest.fixture
def narrow(monkeypatch) -> LlamaCppTarget:
    """A target with sequences for two texts and cells for hardly more than one."""
    monkeypatch.setattr(shared_context, "_CELL_STEP", 256)
    return LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4, bits=32, max_texts=2)


def expected(ids: list[int]) -> torch.Tensor:
    return whole_pass(tiny_model("qwen2"), ids)[-1]


def test_all_texts_and_a_prompt_are_one_pass(passes):
    target, prompts = tiny_llamacpp_target(), [text(4 + seed, seed) for seed in range(6)]
    *sessions, reading = [target.open(ids, 20, "fast") for ids in prompts]
    target.forward([], [(each, each.num_unread) for each in sessions])
    tree = drafted([5, 6, 7, 8], [0, 0, 0, 1])
    logits = target.forward([(each, tree) for each in sessions], [(reading, 3)])
    assert passes == [sum(range(3, 8)), 5 * 4 + 3]
    for ids, each in zip(prompts, logits, strict=False):
        torch.testing.assert_close(each[3], expected([*ids[:-1], 5, 6, 8]), **CLOSE)


@pytest.mark.parametrize("max_texts", [1, 16])
def test_a_shared_prefix_is_not_computed_again(passes, max_texts):
    target = LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4, bits=32, max_texts=max_texts)
    first = text(90)
    source = target.open(first, 9, "fast")
    source.score(DraftTree.empty(first[-1]))
    source.keep((0,))
    session = target.open([*first[:70], 3, 4], 9, "fast")
    assert target.reuse(session, source, 70) == 70
    source.close()
    passes.clear()
    torch.testing.assert_close(session.score(DraftTree.empty(4))[0], expected([*first[:70], 3, 4]), **CLOSE)
    assert sum(passes) == 2


def test_reproducible_mode_reuses_whole_chunks_with_the_same_bits():
    roomy = tiny_llamacpp_target()
    roomy.context_limit = 512
    first = text(300)
    source = roomy.open(first, 9, "reproducible")
    source.score(DraftTree.empty(first[-1]))
    prompt = [*first[:280], 7, 9]
    session = roomy.open(prompt, 9, "reproducible")
    assert roomy.reuse(session, source, 280) == 256
    assert (session.num_kept, session.num_unread) == (256, 25)
    alone = roomy.open(prompt, 9, "reproducible").score(DraftTree.empty(3))
    assert torch.equal(session.score(DraftTree.empty(3)), alone)


def test_reproducible_mode_reuses_nothing_of_a_text_that_its_context_cannot_hold():
    roomy = tiny_llamacpp_target()
    roomy.context_limit = 1024
    first = text(700)
    source = roomy.open(first, 9, "reproducible")
    source.score(DraftTree.empty(first[-1]))
    prompt = [*first[:130], 7, 9]
    session = roomy.open(prompt, 9, "reproducible")
    assert roomy.reuse(session, source, 130) == 0
    alone = roomy.open(prompt, 9, "reproducible").score(DraftTree.empty(3))
    assert torch.equal(session.score(DraftTree.empty(3)), alone)


@settings(max_examples=30)
@given(data=st.data())
def test_texts_that_push_each_other_out_are_scored_as_alone(data):
    """Also between the scoring of a tree and the decision what of it is kept, and by a text that needs more cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_context, "_CELL_STEP", 256)
        target = LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4, bits=32, max_texts=2)
        kept = [text(data.draw(st.integers(1, 60)), seed) for seed in range(4)]
        sessions = [target.open(ids, data.draw(st.sampled_from([20, 150])), "fast") for ids in kept]
        scored: dict[int, list[int]] = {}
        for step in range(12):
            number = data.draw(st.integers(0, 3))
            ids, session = kept[number], sessions[number]
            if number in scored:
                nodes = data.draw(st.sampled_from([(0,), (0, 1), (0, 2), (0, 1, 3)]))
                session.keep(nodes)
                tokens = scored.pop(number)
                kept[number] = [*ids[:-1], *(tokens[node] for node in nodes), 9]
            else:
                tokens = [ids[-1], *text(3, step)]
                logits = session.score(drafted(tokens, [0, 0, 0, 1]))
                torch.testing.assert_close(logits[0], expected(ids), **CLOSE)
                torch.testing.assert_close(logits[3], expected([*ids, tokens[1], tokens[3]]), **CLOSE)
                scored[number] = tokens
        for session in sessions:
            session.close()


def test_a_pass_over_more_texts_than_fit_is_refused_and_leaves_them_usable(narrow):
    prompts = [text(1, seed) for seed in range(3)]
    sessions = [narrow.open(ids, 9, "fast") for ids in prompts]
    with pytest.raises(ContractError, match="a pass over 3 texts; 2 fit"):
        narrow.forward([(each, DraftTree.empty(5)) for each in sessions])
    for session in sessions:
        torch.testing.assert_close(session.score(DraftTree.empty(5))[0], expected([5]), **CLOSE)


def test_memory_is_counted_as_it_is_taken(narrow):
    sessions = [narrow.open(text(40, seed), 216, "fast") for seed in range(2)]
    narrow.forward([], [(each, each.num_unread) for each in sessions])
    cell_bytes = tiny_llamacpp_model().num_key_numbers * 2 * 4
    assert narrow._shared.context.num_cells * cell_bytes <= 2 * narrow.kv_bytes(40, "fast")


def test_a_text_that_ended_needs_no_more_cells_than_it_has_when_its_prefix_is_shared(narrow):
    first = text(60)
    source = narrow.open(first, 196, "fast")
    source.score(DraftTree.empty(first[-1]))
    source.keep((0,))
    before = narrow._shared.context
    session = narrow.open([*first[:50], 3], 205, "fast")
    assert narrow.reuse(session, source, 50) == 50
    assert narrow._shared.context is before
    torch.testing.assert_close(session.score(DraftTree.empty(3))[0], expected([*first[:50], 3]), **CLOSE)


def test_a_text_whose_keys_could_not_be_put_back_gets_them_with_its_next_pass(narrow, monkeypatch):
    prompts = [text(20, seed) for seed in range(3)]
    sessions = [narrow.open(ids, 9, "fast") for ids in prompts]
    for ids, session in zip(prompts, sessions, strict=True):
        session.score(DraftTree.empty(ids[-1]))
        session.keep((0,))

    def refuse(*args):
        raise ModelError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Context, "load", refuse)
        with pytest.raises(ModelError, match="no room"):
            sessions[0].score(DraftTree.empty(5))
    torch.testing.assert_close(sessions[0].score(DraftTree.empty(5))[0], expected([*prompts[0], 5]), **CLOSE)


def test_more_texts_than_llamacpp_can_tell_apart_are_refused_by_the_name_of_the_setting():
    with pytest.raises(ConfigError, match=r"scheduler\.max_num_seqs"):
        LlamaCppTarget(tiny_llamacpp_model(), name="tiny", rows=4, max_texts=MAX_SEQUENCES + 1)
