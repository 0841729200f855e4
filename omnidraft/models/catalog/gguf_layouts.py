"""Where a file of an architecture has the numbers of a weight, where that is not one tensor as it is.

Shapes: E experts, I inner channels, H hidden channels.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from omnidraft.models.catalog.gguf_file import GgufFile

Layout = tuple[Sequence[str], Callable[..., torch.Tensor]]
"""The tensors of a layer, and what makes the weight of the file and them: moves of numbers, which have one way back."""
Layouts = Mapping[str, Layout]
"""By the end of a weight's name in transformers."""


def _as_it_is(file: GgufFile, values: torch.Tensor) -> torch.Tensor:
    return values


def _rows(file: GgufFile, *values: torch.Tensor) -> torch.Tensor:
    return torch.cat(values)


def _transposed(file: GgufFile, values: torch.Tensor) -> torch.Tensor:
    return values.mT.contiguous()


def _gates_and_ups(file: GgufFile, gates_EIH: torch.Tensor, ups_EIH: torch.Tensor) -> torch.Tensor:
    return torch.cat((gates_EIH, ups_EIH), dim=1)


def _unpermuted(key: str) -> Callable[..., torch.Tensor]:
    """Return what puts the first halves of all pairs before the second ones, head by head."""

    def layout(file: GgufFile, values: torch.Tensor) -> torch.Tensor:
        num_heads = file.settings.get(key) or file.settings["attention.head_count"]
        num_heads = max(num_heads) if isinstance(num_heads, list) else num_heads
        pairs = values.reshape(num_heads, len(values) // num_heads // 2, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    return layout


def _interleaved(file: GgufFile, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """Rows of gates and ups by turns, and each expert transposed."""
    values = torch.stack((gates, ups), dim=2).flatten(1, 2)
    return values if values.dim() == 2 else values.mT.contiguous()


def _keys_and_values(file: GgufFile, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.cat((keys.mT, values), dim=1).flatten(0, 1)


def _delta_sizes(file: GgufFile) -> tuple[int, int, int, int]:
    """Return the number of key heads, the value heads of each, and the size of both kinds of heads."""
    num_keys, num_values = file.count("ssm.group_count"), file.count("ssm.time_step_rank")
    return num_keys, num_values // num_keys, file.count("ssm.state_size"), file.count("ssm.inner_size") // num_values


def _by_key_heads(file: GgufFile, joined: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    """The queries, keys, values and gates of one key head after another."""
    num_keys, _, key_size, _ = _delta_sizes(file)
    queries, keys, values = joined.split([num_keys * key_size, num_keys * key_size, len(gates)])
    return torch.cat([each.unflatten(0, (num_keys, -1)) for each in (queries, keys, values, gates)], 1).flatten(0, 1)


def _grouped(file: GgufFile, values: torch.Tensor) -> torch.Tensor:
    """Rows of value heads by the key heads that they belong to; the file has the first of all key heads first."""
    num_keys, num_each, _, _ = _delta_sizes(file)
    return values.unflatten(0, (num_each, num_keys, -1)).swapaxes(0, 1).flatten(0, 2)


def _grouped_last(file: GgufFile, joined: torch.Tensor) -> torch.Tensor:
    """The same for the rows behind those of queries and keys."""
    num_keys, _, key_size, _ = _delta_sizes(file)
    start = 2 * num_keys * key_size
    return torch.cat((joined[:start], _grouped(file, joined[start:])))


def _grouped_columns(file: GgufFile, values: torch.Tensor) -> torch.Tensor:
    return _grouped(file, values.mT).mT


COMMON: Layouts = {
    "experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _gates_and_ups),
    "experts.up_proj": (("ffn_up_exps.weight",), _as_it_is),
    "experts.down_proj": (("ffn_down_exps.weight",), _as_it_is),
    "e_score_correction_bias": (("exp_probs_b.bias",), _as_it_is),
    "expert_bias": (("exp_probs_b.bias",), _as_it_is),
    "dt_bias": (("ssm_dt.bias",), _as_it_is),
    "router.weight": (("ffn_gate_inp.weight",), _as_it_is),
    "router.scale": (("ffn_gate_inp.scale",), _as_it_is),
    "per_expert_scale": (("ffn_down_exps.scale",), _as_it_is),
    "shared_mlp.input_linear.weight": (("ffn_gate_shexp.weight", "ffn_up_shexp.weight"), _rows),
    "shared_mlp.output_linear.weight": (("ffn_down_shexp.weight",), _as_it_is),
    "kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), _keys_and_values),
}
PERMUTED: Layouts = {
    f"{name}_proj.{kind}": ((f"attn_{name}.{kind}",), _unpermuted(key))
    for name, key in (("q", "attention.head_count"), ("k", "attention.head_count_kv"))
    for kind in ("weight", "bias")
}
"""Of architectures that have rows of queries and keys side by side that are rotated together."""
GPT_OSS: Layouts = {
    "experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), _interleaved),
    "experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), _interleaved),
    "experts.down_proj": (("ffn_down_exps.weight",), _transposed),
    "experts.down_proj_bias": (("ffn_down_exps.bias",), _as_it_is),
}
GPT_2: Layouts = {
    "c_attn.weight": (("attn_qkv.weight",), _transposed),
    "attn.c_proj.weight": (("attn_output.weight",), _transposed),
    "c_fc.weight": (("ffn_up.weight",), _transposed),
    "mlp.c_proj.weight": (("ffn_down.weight",), _transposed),
}
QWEN_3_NEXT: Layouts = {"in_proj_qkvz.weight": (("attn_qkv.weight", "attn_gate.weight"), _by_key_heads)}
QWEN_3_5: Layouts = {
    "in_proj_qkv.weight": (("attn_qkv.weight",), _grouped_last),
    "linear_attn.conv1d.weight": (("ssm_conv1d.weight",), _grouped_last),
    "in_proj_z.weight": (("attn_gate.weight",), _grouped),
    "in_proj_a.weight": (("ssm_alpha.weight",), _grouped),
    "in_proj_b.weight": (("ssm_beta.weight",), _grouped),
    "linear_attn.A_log": (("ssm_a",), _grouped),
    "linear_attn.dt_bias": (("ssm_dt.bias",), _grouped),
    "linear_attn.out_proj.weight": (("ssm_out.weight",), _grouped_columns),
}
