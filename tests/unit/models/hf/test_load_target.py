"""A folder is loaded as a target with transformers' own numbers, or refused in one sentence of our own."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from omnidraft.errors import ContractError, ModelError
from omnidraft.models.hf.target import load_target
from omnidraft.models.hf.tokenizer import load_tokenizer
from omnidraft.models.hf.trainable_drafter import load_trainable
from omnidraft.ports import DraftTree
from tests.unit.models.drafted_trees import BUSHY, CLOSE, assert_tree_scores_are_those_of_its_paths, drafted
from tests.unit.models.tiny import SHAPE, WINDOW, text, tiny_model, whole_pass

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA4 = {
    "head_dim": 24, "global_head_dim": 48, "sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict]] = {
    "gemma4 with experts": (
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma4 with shared keys": (
        "gemma4_text",
        GEMMA4 | {
            "num_hidden_layers": 4, "layer_types": [SLIDING, FULL, SLIDING, FULL], "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "attention_k_eq_v": False,
            "initializer_range": 0.05,
        },
    ),
    "hunyuan with experts": ("hunyuan_v1_moe", {"head_dim": 16, "num_experts": 4, "moe_topk": [2] * 3}),
    "longcat": (
        "longcat_flash",
        {
            "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "n_routed_experts": 4, "moe_topk": 2, "zero_expert_num": 1, "expert_ffn_hidden_size": 48,
            "ffn_hidden_size": 96, "num_layers": 2, "num_hidden_layers": 4, "num_key_value_heads": 4,
        },
    ),
    "modernbert": ("modernbert-decoder", {"local_attention": 2 * WINDOW, "pad_token_id": 0}),
    "biogpt": ("biogpt", {}),
    "diffllama": ("diffllama", {}),
}  # fmt: skip


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """A saved model of bfloat16 weights, and the same in float32 as transformers loads it."""
    model_type, sizes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SHAPE, **sizes}))
    model.to(torch.bfloat16).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return folder, theirs.eval()


@pytest.mark.parametrize("precision", ["float32", "packed16"])
def test_scores_of_one_text_and_of_several_are_those_of_transformers(family, precision: str) -> None:
    """A model that computes with its keys or values before it attends to them takes no several texts at once."""
    folder, theirs = family
    target = load_target(folder, name="x", precision=precision, kernels="portable")
    prompts = [text(13), text(21, seed=1)]
    tree = drafted([prompts[0][-1], *text(10, seed=2)], BUSHY)
    session = assert_tree_scores_are_those_of_its_paths(target, theirs, prompts[0], tree)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in session.backend.layers if layer.keys is not None)
    assert 0 < held <= target.kv_bytes(len(prompts[0]), "fast")

    sessions = [target.open(prompt, 20, "fast") for prompt in prompts]
    for each, prompt in zip(sessions, prompts, strict=True):
        target.forward([], [(each, len(prompt) - 1)])
    trees = [(each, DraftTree.empty(prompt[-1])) for each, prompt in zip(sessions, prompts, strict=True)]
    try:
        logits = target.forward(trees)
    except ContractError:
        logits = [target.forward([each])[0] for each in trees]
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row[0], whole_pass(theirs, prompt)[-1], **CLOSE)


@pytest.mark.parametrize(
    ("dtype", "precision", "is_rounded"),
    [
        (torch.float16, "packed16", True),
        (torch.float32, "packed16", True),
        (torch.float16, "float32", False),
        (torch.bfloat16, "packed16", False),
    ],
)
def test_weights_that_lose_bits_are_told_in_one_line(
    dtype: torch.dtype, precision: str, is_rounded: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy.deepcopy(tiny_model("llama")).to(dtype).save_pretrained(tmp_path)
    load_target(tmp_path, name="x", precision=precision, kernels="portable")
    kind = str(dtype).removeprefix("torch.")
    line = f"x has weights of {kind}, which {precision} rounds to bfloat16: models.precision = 'float32' keeps all"
    assert [each.getMessage().startswith(line) for each in caplog.records] == [True] * is_rounded


def test_weights_of_32_bits_that_are_numbers_of_16_lose_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy.deepcopy(tiny_model("llama")).bfloat16().float().save_pretrained(tmp_path)
    load_target(tmp_path, name="x", precision="packed16", kernels="portable")
    assert not caplog.records


def edit_config(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def cut_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def point_to_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (cut_weights, "weights is cut short"),
    "a pointer": (point_to_weights, "or a pointer of Git LFS; fetch it again"),
    "no number": (lambda folder: edit_config(folder / "config.json", hidden_size="many"), "transformers can load"),
    "no such activation": (lambda folder: edit_config(folder / "config.json", hidden_act="swush"), "KeyError: 'swush'"),
    "no such model": (lambda folder: edit_config(folder / "config.json", model_type="nosuch"), "nosuch"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_refused_in_one_sentence(tmp_path: Path, damage: str) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    change, message = DAMAGES[damage]
    change(tmp_path)
    for load in (
        lambda: load_target(tmp_path, name="x", precision="float32"),
        lambda: load_trainable(tmp_path, train="full", rank=1, seed=0),
    ):
        with pytest.raises(ModelError, match=message) as refused:
            load()
        assert "\n" not in str(refused.value)


def test_a_model_that_cannot_be_computed_is_refused_at_its_load(tmp_path: Path) -> None:
    """Three key heads do not go into four query heads, which shows in a pass alone."""
    config = AutoConfig.for_model("mistral", **{**SHAPE, "num_key_value_heads": 3})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="cannot be computed in float32") as refused:
        load_target(tmp_path, name="x", precision="float32")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("file", ["tokenizer.json", "config.json"])
def test_a_tokenizer_that_cannot_be_read_is_refused_in_one_sentence(
    tiny_models: list[Path], tmp_path: Path, file: str
) -> None:
    for path in tiny_models[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / file).write_text('{"model_type": "llama", "layer_types": 7}')
    with pytest.raises(ModelError) as refused:
        load_tokenizer(tmp_path)
    assert "\n" not in str(refused.value)


def test_code_that_lies_in_a_folder_is_not_run_and_nobody_is_asked(
    tiny_models: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", answer)
    for path in tiny_models[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    code = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit_config(tmp_path / "config.json", model_type="own", auto_map=code)
    edit_config(
        tmp_path / "tokenizer_config.json",
        tokenizer_class="OwnTokenizer",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    for load in (
        lambda: load_target(tmp_path, name="x", precision="float32"),
        lambda: load_trainable(tmp_path, train="full", rank=1, seed=0),
        lambda: load_tokenizer(tmp_path),
    ):
        with pytest.raises(ModelError, match="code that lies in its folder, and no such code is run"):
            load()
    assert not (tmp_path / "ran").exists()


def test_a_configuration_without_a_size_has_that_of_its_type(tiny_models: list[Path], tmp_path: Path) -> None:
    """Gemma 3 is published so, and has more rows than tokens."""
    for path in tiny_models[0].iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"hidden_size": 64}}))
    assert len(load_tokenizer(tmp_path).vocabulary) == 262208


def test_a_mark_between_thoughts_and_answer_ends_no_text(tmp_path: Path) -> None:
    """gpt-oss's `<|end|>`, which ends the turns of others."""
    marks = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|endoftext|>"]
    backend = Backend(models.BPE(vocab={each: at for at, each in enumerate("ab")}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    backend.add_special_tokens(marks)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|return|>").save_pretrained(tmp_path)
    ids = {mark: backend.token_to_id(mark) for mark in marks}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", "vocab_size": 9}))
    named = [ids["<|return|>"], ids["<|endoftext|>"], ids["<|call|>"]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": named}))
    assert load_tokenizer(tmp_path).stop_ids == set(named)
