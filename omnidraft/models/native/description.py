"""What a decoder of transformers computes: which of its modules are packed, and what the pass does with them.

Its row of FAMILIES says where its family differs from Llama; what modules and configuration say themselves is read from
there. A model with a weight that its description does not read is not described.
Shapes: C positions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from omnidraft.models.hf.attention import context_limit
from omnidraft.models.native import library as native
from omnidraft.models.native.families import FAMILIES, Family
from omnidraft.models.native.packed_model import ModelSizes, Source

_LANES = 8
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu2": "squared_relu",
}  # fmt: skip


class Undescribed(Exception):
    """The native pass does not compute this model; the message says why."""


class Described:
    """A model that the native pass computes. Raises Undescribed for others."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise Undescribed(f"{config.model_type} is no family that our kernels know")
        if getattr(config, "alibi", False):
            raise Undescribed("its scores have a bias by position")
        base: Any = _first(model, "model", "transformer")
        self._config, self._family, self._base = config, family, _first(base, "language_model") or base
        self.layers: Sequence[Any] = _first(self._base, "layers", "h")
        self.head: Any = model.get_output_embeddings()
        self.embedding: Any = model.get_input_embeddings()
        self.final_norm: Any = _first(self._base, "norm", "final_layernorm", "ln_f")
        self._layers_name = next(name for name, module in model.named_modules() if module is self.layers)
        self.sizes = self._sizes()
        self._require_sizes()
        self._require_all()

    def norms(self, number: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and weights of a layer's norms."""
        layer = self.layers[number]
        attention = getattr(layer, self._family.attention)
        for name in ("norm", "post_norm", "mlp_norm", "post_mlp_norm"):
            if (module := self._norm(layer, name)) is not None:
                yield name, self.norm_weights(module)
        for name, module in (("query_norm", _query_norm(attention)), ("key_norm", _key_norm(attention))):
            if module is not None:
                yield name, self.norm_weights(module, padded=False)

    def norm_weights(self, norm: Any, *, padded: bool = True) -> torch.Tensor:
        """Return the weights of a norm, followed by its bias in a model whose norms have a mean."""
        weight = norm.weight.detach().float() + self._family.adds_one
        bias = getattr(norm, "bias", None)
        rows = [weight, torch.zeros_like(weight) if bias is None else bias.detach().float()]
        rows = rows[: 1 + self.sizes.norms_have_mean]
        return torch.cat([nn.functional.pad(row, (0, -len(row) % native.GROUP if padded else 0)) for row in rows])

    def rotation(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of every position [C, rotated / 2] of the layers of this name."""
        positions, dummy = torch.arange(self.sizes.context_limit)[None], torch.zeros(1)
        options = {"layer_type": name} if name in (getattr(self._config, "layer_types", None) or ()) else {}
        cos_1CD, sin_1CD = self._base.rotary_emb(dummy, positions, **options)
        half = self.sizes.rotated // 2
        is_repeated = cos_1CD.shape[-1] > half and torch.equal(cos_1CD[..., 0::2], cos_1CD[..., 1::2])
        taken = slice(None, None, 2) if is_repeated else slice(None, half)
        return cos_1CD[0, :, taken].float(), sin_1CD[0, :, taken].float()

    def router(self, number: int) -> Any:
        """Return the module that chooses among a layer's experts."""
        return _first(getattr(self.layers[number], self._family.mlp), "gate", "router")

    def experts(self, number: int) -> Iterator[tuple[str, Sequence[Sequence[torch.Tensor]]]]:
        """Yield the names of a layer's matrices and biases, and those of each expert, whose blocks are in turns."""
        experts = getattr(self.layers[number], self._family.mlp).experts
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            if (stacked := getattr(experts, name, None)) is None:
                continue
            each = stacked.detach().unbind()
            if self._family.is_transposed and stacked.dim() == 3:
                each = tuple(matrix.T for matrix in each)
            turns = 2 if name.startswith("gate_up") else 1
            if self._family.is_transposed:
                yield name.replace("_proj", ""), [[one[turn::turns] for turn in range(turns)] for one in each]
            else:
                yield name.replace("_proj", ""), [one.chunk(turns) for one in each]

    def sinks(self, number: int) -> torch.Tensor | None:
        """Return the score of each query head of a layer that no value has; or None."""
        sinks = getattr(getattr(self.layers[number], self._family.attention), "sinks", None)
        return None if sinks is None else sinks.detach().float()

    def query_scale(self) -> torch.Tensor | None:
        """Return what the queries of each position are multiplied by [C], as Llama 4 and Ministral 3 have it."""
        rope = getattr(self._config, "rope_parameters", None) or {}
        if not (beta := rope.get("llama_4_scaling_beta")):
            return None
        positions = torch.arange(self.sizes.context_limit)
        return 1 + beta * torch.log(1 + torch.floor(positions / rope["original_max_position_embeddings"]))

    def _norm(self, layer: Any, name: str) -> Any:
        module = getattr(self._family, name)
        return None if module is None else _first(layer, module, "input_layernorm")

    def _sizes(self) -> ModelSizes:
        config, family, layer = self._config, self._family, self.layers[0]
        attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        heads, key_heads = config.num_attention_heads, _key_heads(config)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
        experts: Any = getattr(mlp, "experts", None)
        gate_up = [] if experts is not None else _gate_up(family.mlp, mlp)
        norm, query_norm = self._norm(layer, "norm") or self._norm(layer, "post_norm"), _query_norm(attention)
        return ModelSizes(
            num_layers=len(self.layers),
            hidden=config.hidden_size,
            num_query_heads=heads,
            num_key_heads=key_heads,
            head_size=head_size,
            mlp=gate_up[0].num_rows if gate_up else experts.down_proj.shape[2 - family.is_transposed],
            vocabulary=len(self.embedding.weight),
            context_limit=context_limit(config),
            eps=_first(norm, "eps", "variance_epsilon"),
            scaling=_first(attention, "scaling", "inv_norm_factor"),
            rotated=self._rotated(),
            activation=self._activation(experts),
            is_gated=len(gate_up) != 1,
            norms_have_mean="RMS" not in type(norm).__name__,
            norms_whole=query_norm is not None and query_norm.weight.numel() != head_size,
            norms_rotated=family.norms_rotated,
            is_parallel=family.is_parallel,
            num_experts=0 if experts is None else len(experts.down_proj),
            experts_per_row=0 if experts is None else config.num_experts_per_tok,
            shares_are_whole=getattr(config, "norm_topk_prob", True),
            embedding_scale=self._embedding_scale(),
            residual_scale=getattr(config, "residual_multiplier", None) or 1.0,
            logit_scale=getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0),
            score_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            windows=tuple(self._window_of(number) for number in range(len(self.layers))),
            rotations=tuple(self._rotation_of(number) for number in range(len(self.layers))),
            layers_name=self._layers_name,
            sources={
                "qkv": _qkv(family, config, attention, heads, key_heads, head_size),
                "out": [_whole(family.attention, attention, "o_proj", "dense")],
                "gate_up": gate_up,
                "down": []
                if experts is not None
                else [_whole(family.mlp, mlp, "down_proj", "c_proj", "dense_4h_to_h", "output_linear")],
            },
        )

    def _activation(self, experts: Any) -> str:
        """Return the kernels' name of what is done with the gate. Raises Undescribed."""
        name = str(_first(self._config, "hidden_activation", "hidden_act", "activation"))
        if self._family.is_transposed:
            is_known = (experts.alpha, experts.limit) == (1.702, 7.0)
            activation = "clamped_swiglu" if is_known else None
        else:
            activation = _ACTIVATIONS.get(name)
        if activation is None:
            raise Undescribed(f"its activation is {name}")
        return activation

    def _require_sizes(self) -> None:
        """Raise Undescribed when the kernels do not take these sizes."""
        sizes, attention = self.sizes, getattr(self.layers[0], self._family.attention)
        problems = {
            f"a head has {sizes.head_size} values": sizes.head_size % native.BLOCK or sizes.head_size > 512,
            f"{sizes.rotated} values of a head are rotated": sizes.rotated % (2 * _LANES),
            "its query heads share keys unevenly": sizes.num_query_heads % sizes.num_key_heads,
            "its norms have a mean of an odd size": sizes.norms_have_mean and sizes.hidden % _LANES,
            "its rows see what follows": getattr(self._config, "use_bidirectional_attention", False),
            "its heads are normed with a mean": sizes.norms_have_mean and _query_norm(attention) is not None,
        }
        if problem := next((text for text, is_one in problems.items() if is_one), None):
            raise Undescribed(problem)

    def _rotation_of(self, number: int) -> str | None:
        """Return the name of a layer's table of rotations; None where there is none."""
        config = self._config
        if self._family.is_unrotated(config, number) or getattr(config, "position_embedding_type", "rope") != "rope":
            return None
        ropes = (getattr(config, "rope_parameters", None) or {}).values()
        return config.layer_types[number] if any(isinstance(each, Mapping) for each in ropes) else "all"

    def _window_of(self, number: int) -> int:
        config = self._config
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[number] not in ("full_attention", "sliding_attention", "attention"):
            raise Undescribed(f"a layer is of the kind {kinds[number]}")
        has_window = getattr(config, "use_sliding_window", True) if kinds is None else kinds[number][0] == "s"
        return (getattr(config, "sliding_window", None) or 0) if has_window else 0

    def _rotated(self) -> int:
        rotary, kinds = self._base.rotary_emb, getattr(self._config, "layer_types", None) or ("",)
        return 2 * len(_first(rotary, f"{kinds[0]}_inv_freq", "inv_freq"))

    def _embedding_scale(self) -> float:
        if self._family.scales_embeddings:
            return float(torch.tensor(math.sqrt(self._config.hidden_size)).to(self.embedding.weight.dtype))
        return getattr(self._config, "embedding_multiplier", None) or 1.0

    def _require_all(self) -> None:
        """Raise Undescribed when a layer or the model has a weight that the description does not read."""
        for layer in self.layers:
            read = {source.module for sources in self.sizes.sources.values() for source in sources}
            norms = {id(self._norm(layer, name)) for name in ("norm", "post_norm", "mlp_norm", "post_mlp_norm")}
            attention = getattr(layer, self._family.attention)
            norms |= {id(_query_norm(attention)), id(_key_norm(attention))}
            if self.sizes.num_experts:
                mlp = getattr(layer, self._family.mlp)
                norms |= {id(_first(mlp, "gate", "router")), id(getattr(mlp, "experts", None))}
            if hasattr(attention, "sinks"):
                norms.add(id(attention))
            for name, module in layer.named_modules():
                if list(module.parameters(recurse=False)) and name not in read and id(module) not in norms:
                    raise Undescribed(f"its layers have a {name}")
        known = {id(each) for each in (self.embedding, self.head, self.final_norm)}
        inside = {id(module) for layer in self.layers for module in layer.modules()}
        for name, module in self._base.named_modules():
            if list(module.parameters(recurse=False)) and id(module) not in known | inside:
                raise Undescribed(f"it has {name}")
        if getattr(self.head, "bias", None) is not None:
            raise Undescribed("its head has a bias")


def _first(module: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def _query_norm(attention: Any) -> Any:
    return _first(attention, "q_norm", "query_layernorm")


def _key_norm(attention: Any) -> Any:
    return _first(attention, "k_norm", "key_layernorm")


def _key_heads(config: Any) -> int:
    if config.model_type != "falcon":
        return getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if config.new_decoder_architecture:
        return config.num_kv_heads
    return 1 if config.multi_query else config.num_attention_heads


def _whole(path: str, parent: Any, *names: str) -> Source:
    name = next(name for name in names if hasattr(parent, name))
    return Source(f"{path}.{name}", [[0, len(getattr(parent, name).weight)]])


def _gate_up(path: str, mlp: Any) -> list[Source]:
    """Return the gate and the input matrix of an MLP, or the input matrix alone."""
    if hasattr(mlp, "gate_proj"):
        return [_whole(path, mlp, "gate_proj"), _whole(path, mlp, "up_proj")]
    fused = next((name for name in ("gate_up_proj", "input_linear") if hasattr(mlp, name)), None)
    if fused is None:
        return [_whole(path, mlp, "up_proj", "c_fc", "dense_h_to_4h")]
    size = len(getattr(mlp, fused).weight) // 2
    return [Source(f"{path}.{fused}", [[0, size]]), Source(f"{path}.{fused}", [[size, 2 * size]])]


def _qkv(family: Family, config: Any, attention: Any, heads: int, key_heads: int, size: int) -> list[Source]:
    """Return the matrices of queries, keys and values."""
    path, paired = family.attention, family.is_paired
    if hasattr(attention, "q_proj"):
        queries, keys, values = (_whole(path, attention, name) for name in ("q_proj", "k_proj", "v_proj"))
        return [queries._replace(is_paired=paired), keys._replace(is_paired=paired), values]
    name = next(name for name in ("qkv_proj", "query_key_value") if hasattr(attention, name))
    counts, groups = (heads, key_heads, key_heads), 1
    if getattr(config, "new_decoder_architecture", False) or (name == "query_key_value" and key_heads == heads):
        counts, groups = (heads // key_heads, 1, 1), key_heads  # the query heads of a group, then its key and value
    ends = [size * sum(counts[:number]) for number in range(4)]
    starts = [group * ends[3] for group in range(groups)]
    spans = [[[start + ends[each], start + ends[each + 1]] for start in starts] for each in range(3)]
    return [Source(f"{path}.{name}", spans[each], paired and each < 2) for each in range(3)]
