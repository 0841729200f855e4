"""What an architecture of GGUF files is in transformers: a row each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from omnidraft.errors import ModelError
from omnidraft.models.catalog.gguf_file import ROPE_TENSORS, GgufFile
from omnidraft.models.catalog.gguf_layouts import GPT_2, GPT_OSS, PERMUTED, QWEN_3_5, QWEN_3_NEXT, Layouts

Json = dict[str, Any]

OTHERWISE = "give the hub id or folder of the same model, or set models.engine = 'llamacpp'"
"""What to do with a file that is not converted."""
Change = tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]
"""What makes numbers of a file those of transformers, and what makes them back."""
_ONE_ADDED: Change = (lambda values: values - 1, lambda values: values + 1)
_SAME: Change = (lambda values: values, lambda values: values)
_DECAY: Mapping[str, Change] = {"A_log": (lambda values: (-values).log(), lambda values: -values.exp())}
_DELTA_CHANGES = {**_DECAY, "linear_attn.norm.weight": _SAME, "norm.weight": _ONE_ADDED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Where an architecture differs from others."""

    model_type: str | Callable[[GgufFile], str]
    layouts: Layouts = field(default_factory=dict)
    """What lies otherwise in the file than in transformers."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """What numbers become that the file has otherwise, by the end of their weight's name in transformers."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that all models of the architecture have."""
    settings: Callable[[GgufFile], Json] = lambda file: {}
    """Settings that depend on the file."""
    reads: Sequence[str] = ()
    """What the former reads that layers may have differently."""
    sliding_theta: float | None = None
    """The rotary base of layers with a window, where the file does not say; None: as that of the others."""

    def read(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a weight in transformers, from those in the file."""
        return self._changed(name, values, 0)

    def written(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """Return the numbers of a weight in the file, from those in transformers."""
        return self._changed(name, values, 1)

    def _changed(self, name: str, values: torch.Tensor, direction: int) -> torch.Tensor:
        change = next((change for ending, change in self.changes.items() if name.endswith(ending)), None)
        return values if change is None else change[direction](values)


def _gemma_scale(num_layers: int) -> Callable[[GgufFile], Json]:
    """Return what Gemma divides scores by the root of: a head's size, but in the model of 27B with so many layers."""

    def settings(file: GgufFile) -> Json:
        is_27b = file.count("block_count") == num_layers
        return {"query_pre_attn_scalar": file.whole_head_size if is_27b else file.head_size}

    return settings


def _require_rotation(file: GgufFile) -> Json:
    """Raise ModelError for a Granite without rotation."""
    if not file.setting("rope.scaling.finetuned", True):
        raise ModelError(f"{file.name} has layers without positions, which is not converted")
    return {}


def _gemma_4(file: GgufFile) -> Json:
    is_sliding, num_keys = file.settings["attention.sliding_window_pattern"], file.by_layer("attention.head_count_kv")
    widths, factors = file.by_layer("feed_forward_length"), file.values(ROPE_TENSORS[0])
    sliding, full = is_sliding.index(True), is_sliding.index(False)
    return {
        "head_dim": file.count("attention.key_length_swa"),
        "global_head_dim": file.count("attention.key_length"),
        "num_key_value_heads": num_keys[sliding],
        "num_global_key_value_heads": num_keys[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] > widths[0],
        "num_kv_shared_layers": file.setting("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": file.setting("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.shape("token_embd.weight")[0],
        "enable_moe_block": "expert_count" in file.settings,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.setting("rope.freq_base"),
                "partial_rotary_factor": (factors == 1).float().mean().item(),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": file.setting("rope.freq_base_swa")},
        },
    }


def _delta(file: GgufFile) -> Json:
    """Layers of Qwen3-Next and 3.5 that have a state."""
    num_heads, every = file.count("ssm.time_step_rank"), file.setting("full_attention_interval", 4)
    standard = [(layer + 1) % every != 0 for layer in range(file.num_layers)]
    return {
        "linear_value_head_dim": file.count("ssm.inner_size") // num_heads,
        "layer_types": _layers(file.settings.get("attention.recurrent_layers", standard)[: file.num_layers]),
    }


def _mamba(file: GgufFile) -> Json:
    """The sizes of layers with a state, by the names of all classes."""
    inner = file.count("ssm.inner_size")
    size, expand = inner // file.count("ssm.time_step_rank"), inner / file.count("embedding_length")
    expand = int(expand) if expand.is_integer() else expand
    return {
        "mamba_d_head": size,
        "mamba_head_dim": size,
        "mamba_d_ssm": inner,
        "expand": expand,
        "mamba_expand": expand,
    }


def _layers(is_recurrent: Sequence[bool], recurrent: str = "linear_attention") -> list[str]:
    return [recurrent if each else "full_attention" for each in is_recurrent]


def _without_keys(file: GgufFile) -> list[bool]:
    """Return which layers have no attention."""
    return [not number for number in file.by_layer("attention.head_count_kv")]


def _latent(file: GgufFile) -> Json:
    """DeepSeek's attention."""
    size, num_groups = file.count("rope.dimension_count"), file.setting("expert_group_count", 1)
    whole = file.setting("attention.key_length_mla", file.setting("attention.key_length"))
    return {
        "head_dim": size,
        "num_key_value_heads": file.count("attention.head_count"),
        "q_lora_rank": file.setting("attention.q_lora_rank"),
        "qk_rope_head_dim": size,
        "qk_nope_head_dim": whole - size,
        "qk_head_dim": whole,
        "v_head_dim": file.setting("attention.value_length_mla", file.setting("attention.value_length")),
        "topk_method": "group_limited_greedy" if num_groups > 1 else "greedy",
    }


def _nemotron_h(file: GgufFile) -> Json:
    kinds = ["moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp" for layer in range(file.num_layers)]
    for layer, has_none in enumerate(_without_keys(file)[: file.num_layers]):
        if not has_none:
            kinds[layer] = "full_attention"
        elif f"blk.{layer}.ssm_in.weight" in file.tensors:
            kinds[layer] = "linear_attention"
    return {**_mamba(file), "layers_block_type": kinds}


def _jamba(file: GgufFile) -> Json:
    """Which layers have attention, and which have experts: each so many."""
    attention = [layer for layer, has_none in enumerate(_without_keys(file)) if not has_none]
    experts = [layer for layer in range(file.num_layers) if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors]
    steps = {"attn_layer": attention, "expert_layer": experts}
    return {
        **_mamba(file),
        **{f"{name}_offset": layers[0] if layers else 0 for name, layers in steps.items()},
        **{
            f"{name}_period": layers[1] - layers[0] if len(layers) > 1 else file.num_layers
            for name, layers in steps.items()
        },
    }


_NEMOTRON_H = Architecture(model_type="nemotron_h", layouts=PERMUTED, changes=_DECAY, settings=_nemotron_h)
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        model_type=lambda file: "mixtral" if file.setting("expert_count") else "llama", layouts=PERMUTED
    ),
    "mistral3": Architecture(
        model_type=lambda file: "ministral3" if file.setting("attention.temperature_scale") else "mistral",
        layouts=PERMUTED,
    ),
    "arcee": Architecture(model_type="arcee", layouts=PERMUTED),
    "smollm3": Architecture(model_type="smollm3", layouts=PERMUTED),
    "granite": Architecture(model_type="granite", layouts=PERMUTED, settings=_require_rotation),
    "qwen2": Architecture(model_type="qwen2"),
    "qwen2moe": Architecture(model_type="qwen2_moe"),
    "qwen3": Architecture(model_type="qwen3"),
    "qwen3moe": Architecture(model_type="qwen3_moe", fixed={"norm_topk_prob": True}),
    "gemma": Architecture(model_type="gemma", changes={"norm.weight": _ONE_ADDED}),
    "gemma2": Architecture(model_type="gemma2", changes={"norm.weight": _ONE_ADDED}, settings=_gemma_scale(46)),
    "gemma3": Architecture(
        model_type="gemma3_text", changes={"norm.weight": _ONE_ADDED}, settings=_gemma_scale(62), sliding_theta=1e4
    ),
    "phi3": Architecture(model_type="phi3"),
    "olmo2": Architecture(model_type=lambda file: "olmo3" if file.setting("attention.sliding_window") else "olmo2"),
    "olmoe": Architecture(model_type="olmoe"),
    "exaone4": Architecture(model_type="exaone4"),
    "command-r": Architecture(model_type="cohere"),
    "cohere2": Architecture(model_type="cohere2"),
    "glm4": Architecture(model_type="glm4"),
    "ernie4_5": Architecture(model_type="ernie4_5"),
    "hunyuan-dense": Architecture(model_type="hunyuan_v1_dense"),
    "seed_oss": Architecture(model_type="seed_oss"),
    "starcoder2": Architecture(model_type="starcoder2"),
    "stablelm": Architecture(model_type="stablelm"),
    "nemotron": Architecture(model_type="nemotron", changes={"norm.weight": _ONE_ADDED}),
    "gpt-oss": Architecture(model_type="gpt_oss", layouts=GPT_OSS),
    "gemma4": Architecture(
        model_type="gemma4_text", settings=_gemma_4, reads=("feed_forward_length", "attention.head_count_kv")
    ),
    "qwen3next": Architecture(
        model_type="qwen3_next",
        layouts=QWEN_3_NEXT,
        changes=_DELTA_CHANGES,
        settings=_delta,
        fixed={"norm_topk_prob": True},
    ),
    "qwen35": Architecture(model_type="qwen3_5_text", layouts=QWEN_3_5, changes=_DELTA_CHANGES, settings=_delta),
    "qwen35moe": Architecture(model_type="qwen3_5_moe_text", layouts=QWEN_3_5, changes=_DELTA_CHANGES, settings=_delta),
    "lfm2": Architecture(
        model_type="lfm2",
        fixed={"block_auto_adjust_ff_dim": False},
        settings=lambda file: {"layer_types": _layers(_without_keys(file), "conv")},
    ),
    "lfm2moe": Architecture(
        model_type="lfm2_moe", settings=lambda file: {"layer_types": _layers(_without_keys(file), "conv")}
    ),
    "glm4moe": Architecture(model_type="glm4_moe"),
    "deepseek2": Architecture(
        model_type=lambda file: "deepseek_v3" if any("exp_probs_b" in name for name in file.tensors) else "deepseek_v2",
        settings=_latent,
    ),
    "ernie4_5-moe": Architecture(
        model_type="ernie4_5_moe", settings=lambda file: {"moe_layer_end_index": file.num_layers - 1}
    ),
    "dots1": Architecture(model_type="dots1"),
    "exaone-moe": Architecture(model_type="exaone_moe"),
    "minimax-m2": Architecture(model_type="minimax_m2"),
    "hunyuan-moe": Architecture(model_type="hunyuan_v1_moe"),
    "granitemoe": Architecture(
        model_type=lambda file: (
            "granitemoeshared" if file.setting("expert_shared_feed_forward_length") else "granitemoe"
        ),
        layouts=PERMUTED,
    ),
    "granitehybrid": Architecture(
        model_type="granitemoehybrid",
        layouts=PERMUTED,
        changes=_DECAY,
        settings=lambda file: {
            **_mamba(file),
            "layer_types": _layers(_without_keys(file)),
            "position_embedding_type": "rope" if file.setting("rope.scaling.finetuned", True) else None,
        },
    ),
    "falcon-h1": Architecture(model_type="falcon_h1", changes=_DECAY, settings=_mamba),
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h_moe": _NEMOTRON_H,
    "mamba": Architecture(
        model_type=lambda file: "falcon_mamba" if file.setting("ssm.dt_b_c_rms") else "mamba",
        changes=_DECAY,
        settings=lambda file: {**_mamba(file), "intermediate_size": file.count("ssm.inner_size")},
    ),
    "mamba2": Architecture(
        model_type="mamba2",
        changes=_DECAY,
        settings=lambda file: {**_mamba(file), "head_dim": _mamba(file)["mamba_head_dim"]},
    ),
    "jamba": Architecture(model_type="jamba", changes=_DECAY, settings=_jamba),
    "phi2": Architecture(model_type="phi"),
    "gpt2": Architecture(model_type="gpt2", layouts=GPT_2),
    "starcoder": Architecture(model_type="gpt_bigcode"),
    "jais2": Architecture(model_type="jais2"),
}


def architecture_of(file: GgufFile) -> Architecture:
    """Return the row of a file. Raises ModelError where there is none."""
    if (row := ARCHITECTURES.get(file.architecture)) is None:
        raise ModelError(
            f"{file.name} is of the architecture {file.architecture!r}, which is not converted; {OTHERWISE}"
        )
    return row
