"""The transformers target against transformers itself: trees, caches, windows, and equal bits in reproducible mode."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma3nTextConfig,
    GPT2Config,
)

from omnidraft.errors import ConfigError, ModelError, ModeRefused
from omnidraft.models.hf import slot_model
from omnidraft.models.hf.target import TransformersTarget, load_model
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.models.native import library as native
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import (
    BUSHY,
    CLOSE,
    assert_tree_scores_are_those_of_its_paths,
    chain,
    drafted,
    scores_by_partition,
)
from tests.unit.models.tiny import CONFIGS, PASSES, SHAPE, VOCAB_SIZE, text, tiny_model, tiny_target, whole_pass

NAMES = list(CONFIGS)


@settings(max_examples=10)
@given(name=st.sampled_from(NAMES), seed=st.integers(0, 1000), data=st.data())
def test_any_tree_keeps_any_of_its_paths(name, seed, data):
    """Two trees in a row: what was kept of the first, and only that, is what the second continues."""
    prompt, model = text(data.draw(st.integers(1, 12)), seed), tiny_model(name)
    parents = [0] + [data.draw(st.integers(0, max(node - 1, 0))) for node in range(1, 9)]
    tree = drafted([prompt[-1], *text(8, seed + 1)], parents)
    session = assert_tree_scores_are_those_of_its_paths(tiny_target(name), model, prompt, tree)
    nodes = [data.draw(st.integers(0, 8))]
    while nodes[0]:
        nodes.insert(0, parents[nodes[0]])
    session.keep(nodes)
    kept = [*prompt[:-1], *(tree.tokens[node] for node in nodes)]
    scores = session.score(chain([7, 8]))
    torch.testing.assert_close(scores, whole_pass(model, [*kept, 7, 8])[-2:], **CLOSE)


def test_layers_that_share_keys_keep_a_path_and_lend_a_prefix():
    """The last layers of Gemma 3n and 4 have no keys of their own."""
    config = Gemma3nTextConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        num_kv_shared_layers=1,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size_per_layer_input=8,
        altup_num_inputs=2,
        laurel_rank=8,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    target, prompt = TransformersTarget(model, PASSES, name="gemma3n", precision="float32"), text(13)
    tree = drafted([prompt[-1], *text(10, seed=2)], BUSHY)
    source = assert_tree_scores_are_those_of_its_paths(target, model, prompt, tree)
    source.keep((0, 2, 5))
    kept = [*prompt, tree.tokens[2], tree.tokens[5]]
    session = target.open([*kept, 7], 20, "fast")
    assert target.reuse(session, source, len(kept)) == len(kept)
    for each in (source, session):
        scores = each.score(DraftTree.empty(7))
        torch.testing.assert_close(scores[0], whole_pass(model, [*kept, 7])[-1], **CLOSE)


@pytest.mark.parametrize(
    ("name", "mode"), [("llama", "fast"), ("qwen2", "reproducible"), ("gemma3", "reproducible"), ("mistral", "fast")]
)
def test_greedy_text_is_that_of_transformers_generate(name, mode):
    prompt, model = text(21, seed=5), tiny_model(name)
    ids_1S = torch.tensor([prompt])
    whole = model.generate(
        ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=12, do_sample=False, eos_token_id=None
    )
    expected = whole[0, len(prompt) :]
    session = tiny_target(name).open(prompt, 12, mode)
    ids = [prompt[-1]]
    for _ in range(12):
        ids.append(int(session.score(DraftTree.empty(ids[-1]))[0].argmax()))
        session.keep((0,))
    assert ids[1:] == expected.tolist()


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("llama", precision) for precision in ("float32", "packed16", "bfloat16")),
        ("qwen2", "packed16"),
        ("gemma3", "bfloat16"),
        ("mistral", "float32"),
    ],
)
def test_reproducible_mode_gives_the_same_bits_however_the_text_was_drafted(name, precision):
    target, prompt, following = tiny_target(name, precision), text(19), text(11, seed=3)
    plain = scores_by_partition(target, prompt, following, [1] * 12)
    for sizes in ([4, 4, 4], [1, 3, 4, 2, 2], [2, 2, 2, 3, 3], [3, 1, 1, 4, 3]):
        assert torch.equal(scores_by_partition(target, prompt, following, sizes), plain)


@pytest.mark.parametrize("precision", ["float32", "packed16"])
def test_reproducible_mode_gives_the_same_bits_where_the_slots_double(precision):
    """Plain decoding computes an id with the slots of its own position, and a chain reaches over several."""
    shape = PASSES
    target = tiny_target("llama", precision)
    end = shape.capacity_step - max(shape.width, shape.prefill_rows) + 1
    prompt, following = text(end - 4), text(11, seed=3)
    assert target.kv_bytes(len(prompt), "reproducible") < target.kv_bytes(end + 8, "reproducible")
    plain = scores_by_partition(target, prompt, following, [1] * 12)
    for sizes in ([4, 4, 4], [1, 3, 4, 2, 2], [2, 2, 2, 3, 3], [3, 1, 1, 4, 3], [3, 4, 1, 2, 2]):
        assert torch.equal(scores_by_partition(target, prompt, following, sizes), plain)
    session = target.open(prompt, 200, "reproducible")
    for index, token in enumerate([prompt[-1], *following]):
        scores = session.score(chain([token, *text(shape.width - 1, seed=index + 50)]))
        session.keep((0,))
        assert torch.equal(scores[0], plain[index])


def test_whole_chunks_are_taken_over_and_not_read_again(monkeypatch):
    target, prompt = tiny_target("llama"), text(19)
    source, session = (target.open(prompt, 5, "reproducible") for _ in range(2))
    source.score(DraftTree.empty(prompt[-1]))
    assert target.reuse(session, source, 13) == session.num_kept == PASSES.prefill_rows
    starts, read = [], session._pass

    def counted(slots, start, *args, **options):
        starts.append(start)
        return read(slots, start, *args, **options)

    monkeypatch.setattr(session, "_pass", counted)
    session.score(DraftTree.empty(prompt[-1]))
    assert starts == [8, 16, 18]


def test_a_prompt_whose_pass_failed_is_still_unread(monkeypatch):
    target, prompt = tiny_target("llama"), text(19)
    expected = target.open(prompt, 5, "reproducible").score(DraftTree.empty(prompt[-1]))
    session = target.open(prompt, 5, "reproducible")
    with monkeypatch.context() as patched:
        patched.setattr(session, "_compute", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.read(7)
    assert (session.num_kept, session.num_unread) == (0, 18)
    assert torch.equal(session.score(DraftTree.empty(prompt[-1])), expected)


class LooksAtPadding(TransformersTarget):
    """Planted: a model whose logits depend a little on what else is in the pass."""

    def compute(self, slots, ids_S, positions_S, sees_SC, num_logits):
        logits = super().compute(slots, ids_S, positions_S, sees_SC, num_logits)
        return logits + 1e-6 * ids_S[-1]


def test_the_self_test_refuses_a_model_whose_bits_depend_on_the_rest_of_the_pass():
    target = LooksAtPadding(tiny_model("llama"), PASSES, name="x", precision="float32")
    with pytest.raises(ConfigError, match=r"decode\.mode = 'fast'"):
        target.open(text(4), 10, "reproducible")
    target.open(text(4), 10, "fast")


def test_the_self_test_runs_once_for_a_capacity():
    passes = []

    class Counted(TransformersTarget):
        def compute(self, *args):
            passes.append(1)
            return super().compute(*args)

    target = Counted(tiny_model("llama"), PASSES, name="x", precision="float32")
    target.open([3], 10, "reproducible")
    num_first = len(passes)
    target.open([3], 12, "reproducible")
    assert num_first == 3 * PASSES.width
    assert len(passes) == num_first
    target.open(text(100), 10, "reproducible")
    assert len(passes) == 2 * num_first


def test_a_refusal_is_remembered_for_its_capacity():
    passes, refusals, counts = [], [], []

    class Counted(LooksAtPadding):
        def compute(self, *args):
            passes.append(1)
            return super().compute(*args)

    target = Counted(tiny_model("llama"), PASSES, name="x", precision="float32")
    for prompt in ([3], [4], text(100)):
        with pytest.raises(ModeRefused) as refused:
            target.open(prompt, 10, "reproducible")
        assert str(refused.value).startswith(f"{refused.value.reason}: set decode.mode")
        refusals.append(str(refused.value))
        counts.append(len(passes))
    assert refusals[0] == refusals[1] != refusals[2]
    assert 0 < counts[0] == counts[1] < counts[2]


@pytest.mark.parametrize("mode", ["fast", "reproducible"])
def test_the_context_can_be_filled_to_its_last_id(mode):
    """The model's table of positions ends at its context limit."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_positions=24, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    session = TransformersTarget(model, PASSES, name="gpt2", precision="float32").open(text(20), 4, mode)
    ids = text(20)
    for token in (ids[-1], 5, 6, 7):
        scores = session.score(DraftTree.empty(token))
        session.keep((0,))
    torch.testing.assert_close(scores[0], whole_pass(model, [*ids, 5, 6, 7])[-1], **CLOSE)


def test_a_closed_session_frees_its_keys_and_closing_twice_is_allowed():
    session = tiny_target("llama").open(text(9), 5, "fast")
    session.close()
    session.close()
    assert session.backend.capacity == 0


def test_the_fingerprint_names_what_a_text_depends_on():
    others = [
        tiny_target("llama", shape=replace(PASSES, width=6)),
        tiny_target("llama", "packed16"),
        tiny_target("qwen2"),
    ]
    assert len({tiny_target("llama").fingerprint, *(other.fingerprint for other in others)}) == 4


def test_the_fingerprint_names_the_instructions_that_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch, and of our kernels where they multiply its matrices."""

    def fingerprints() -> list[str]:
        return [tiny_target("gemma3", precision).fingerprint for precision in ("float32", "packed16")]

    before = fingerprints()
    monkeypatch.setattr(native, "bits", lambda library, precision: "other kernels")
    others = fingerprints()
    assert others[0] == before[0]
    assert others[1] != before[1]
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "other instructions")
    assert not set(fingerprints()) & {*before, *others}


def plant_load(folder: Path, monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    """Put this in the place of transformers, over a folder with a configuration."""
    CONFIGS["llama"].save_pretrained(folder)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", load)


@pytest.mark.parametrize("error", [ImportError, RuntimeError, KeyError, TypeError, Exception])
def test_what_transformers_misses_is_named(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of a quantisation, or weights of experts that it joins."""

    def load(folder: Path, **options: Any) -> Any:
        raise error("Using `fewbits` quantization requires fewbits\nSee there.")

    plant_load(tmp_path, monkeypatch, load)
    for load in (load_model, partial(load_trainable, train="lora", rank=2, seed=0)):
        with pytest.raises(ModelError, match="requires fewbits") as refused:
            load(tmp_path)
        assert "\n" not in str(refused.value)


def held_bytes(session):
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in session.backend.layers)


@pytest.mark.parametrize(("name", "mode"), [("llama", "reproducible"), ("gemma3", "fast"), ("mistral", "reproducible")])
def test_memory_comes_with_the_ids(name, mode, monkeypatch):
    monkeypatch.setattr(slot_model, "_CAPACITY_STEP", 64)
    target, ids = tiny_target(name), text(150)
    session = target.open(ids[:10], 200, mode)
    session.score(DraftTree.empty(ids[9]))
    assert held_bytes(session) <= target.kv_bytes(10, mode) < target.kv_bytes(210, mode)
    session.keep((0,))
    for token in ids[10:]:
        row_V = session.score(DraftTree.empty(token))[0]
        session.keep((0,))
        assert held_bytes(session) <= target.kv_bytes(session.num_kept, mode)
    torch.testing.assert_close(row_V, whole_pass(tiny_model(name), ids)[-1], **CLOSE)
