"""Several texts in one pass of a transformers model get the logits that each gets alone, up to rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omnidraft.models.acceptance_head import AcceptanceHead
from omnidraft.models.hf import attention
from omnidraft.models.hf.drafter import TorchDrafter
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import BUSHY, CLOSE, drafted
from tests.unit.models.tiny import CONFIGS, SHAPE, text, tiny_model, tiny_target, whole_pass


@pytest.fixture(scope="module", params=["text by text", "in groups"], autouse=True)
def attention_of_texts(request):
    """How a processor, and how an accelerator computes the attention of several texts; both here on a processor."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "in groups":
            patch.setattr(attention, "_is_on_processor", lambda query: False)
        yield request.param


class Counting:
    """Counts the passes of a model, and the most rows of one."""

    def __init__(self, model):
        self.rows: list[int] = []
        self.hook = model.register_forward_pre_hook(
            lambda _, args, kwargs: self.rows.append(kwargs["input_ids"].numel()), with_kwargs=True
        )

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.hook.remove()


@pytest.mark.parametrize("name", CONFIGS)
def test_trees_and_prompts_of_several_texts_are_one_pass(name):
    target, model = tiny_target(name), tiny_model(name)
    first, second, third = text(13), text(30, seed=1), text(40, seed=2)
    sessions = [target.open(ids, 60, "fast") for ids in (first, second, third)]
    bushy = drafted([first[-1], *text(10, seed=2)], BUSHY)
    with Counting(target._model) as counted:
        target.forward([], [(sessions[0], 12), (sessions[1], 29), (sessions[2], 20)])
        logits = target.forward([(sessions[0], bushy), (sessions[1], DraftTree.empty(second[-1]))], [(sessions[2], 19)])
    assert counted.rows == [61, 31]
    for node in range(len(bushy)):
        path = [node]
        while path[0]:
            path.insert(0, bushy.parents[path[0]])
        expected = whole_pass(model, [*first[:-1], *(bushy.tokens[each] for each in path)])[-1]
        torch.testing.assert_close(logits[0][node], expected, **CLOSE)
    torch.testing.assert_close(logits[1], whole_pass(model, second)[-1:], **CLOSE)
    torch.testing.assert_close(sessions[2].score(DraftTree.empty(third[-1])), whole_pass(model, third)[-1:], **CLOSE)


def test_texts_of_both_modes_may_share_a_call():
    target = tiny_target("llama")
    prompts = [text(5 + 9 * number, seed=number) for number in range(4)]
    sessions = [target.open(ids, 9, mode) for ids, mode in zip(prompts, ["fast", "reproducible"] * 2, strict=True)]
    trees = [drafted([ids[-1], 7], [0, 0]) for ids in prompts]
    target.forward([], [(session, session.num_unread) for session in sessions])
    for ids, logits in zip(prompts, target.forward(list(zip(sessions, trees, strict=True))), strict=True):
        torch.testing.assert_close(logits, whole_pass(tiny_model("llama"), [*ids, 7])[-2:], **CLOSE)


def wild_head() -> AcceptanceHead:
    head = AcceptanceHead(SHAPE["hidden_size"])
    torch.nn.init.normal_(head.out.weight)
    return head.requires_grad_(False)


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=3)
@given(data=st.data())
def test_drafters_steps_of_several_texts_are_one_pass(name, data):
    head = wild_head() if data.draw(st.booleans()) else None
    drafter, model = TorchDrafter(tiny_model(name), head), tiny_model(name)
    texts = [text(data.draw(st.integers(1, 40)), seed) for seed in range(data.draw(st.integers(1, 5)))]
    sessions = [drafter.open() for _ in texts]
    with Counting(model) as counted:
        advanced = drafter.prefill_or_extend_all(
            [(session, 0, ids) for session, ids in zip(sessions, texts, strict=True)]
        )
        branched = drafter.branch_all([(session, [3, 4, 5], [-1, -1, 0]) for session in sessions])
        again = drafter.prefill_or_extend_all(
            [(each, len(ids), [3, 5, 9]) for each, ids in zip(sessions, texts, strict=True)]
        )
    assert counted.rows == [sum(map(len, texts)), 3 * len(texts), len(texts)]
    for number, ids in enumerate(texts):
        torch.testing.assert_close(torch.from_numpy(advanced[number]), whole_pass(model, ids)[-1], **CLOSE)
        expected = [whole_pass(model, [*ids, *more])[-1] for more in ([3], [4], [3, 5])]
        torch.testing.assert_close(torch.from_numpy(branched[number]), torch.stack(expected), **CLOSE)
        torch.testing.assert_close(torch.from_numpy(again[number]), whole_pass(model, [*ids, 3, 5, 9])[-1], **CLOSE)
        if head is not None:
            alone = drafter.open()
            alone.prefill_or_extend(0, [*ids, 3, 5, 9])
            [got], [expected] = sessions[number].acceptance_probabilities(), alone.acceptance_probabilities()
            assert got(-1.0) == pytest.approx(expected(-1.0), abs=1e-3)


def test_texts_of_like_numbers_of_rows_are_one_attention(attention_of_texts, monkeypatch):
    """Eight texts with one to four rows, and a long prompt."""
    target, model = tiny_target("llama"), tiny_model("llama")
    prompts = [text(3 + 5 * number, number) for number in range(8)]
    sessions = [target.open(ids, 60, "fast") for ids in prompts]
    target.forward([], [(each, each.num_unread) for each in sessions])
    trees = [
        drafted([ids[-1], *range(2, 2 + number % 4)], [0] * (1 + number % 4)) for number, ids in enumerate(prompts)
    ]
    sizes = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def counted(query, *args, **kwargs):
        sizes.append((query.shape[0], query.shape[2]))
        return attend(query, *args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    scored = target.forward(list(zip(sessions, trees, strict=True)), [(target.open(text(43), 9, "fast"), 42)])
    for ids, tree, logits in zip(prompts, trees, scored, strict=True):
        for node, token in enumerate(tree.tokens):
            ids_to_node = [*ids, token] if node else ids
            torch.testing.assert_close(logits[node], whole_pass(model, ids_to_node)[-1], **CLOSE)
    if attention_of_texts == "in groups":
        assert sizes[:4] == [(2, 1), (2, 2), (4, 4), (1, 42)]
    else:
        assert sizes[:9] == [(1, 1 + number % 4) for number in range(8)] + [(1, 42)]
