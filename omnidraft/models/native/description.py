"""What a decoder of transformers computes: which of its modules are packed, and what the pass does with them.

Its row of FAMILIES says where its family differs from Llama; what modules and configuration say themselves is read from
there. A model with a weight that its description does not read is not described.
Shapes: C positions.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from omnidraft.models.hf.attention import context_limit, first_context, rotate_by_length
from omnidraft.models.native import library as native
from omnidraft.models.native.families import FAMILIES
from omnidraft.models.native.layer_description import DescribedLayer, Undescribed, first, has_mean, norm_weights, saved
from omnidraft.models.native.packed_model import ModelSizes

_LANES = 8
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu",
    "relu2": "squared_relu",
}  # fmt: skip


class Described:
    """A model that the native pass computes. Raises Undescribed for others."""

    def __init__(self, model: PreTrainedModel) -> None:
        config: Any = model.config.get_text_config()
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise Undescribed(f"{config.model_type} is no family that our kernels know")
        if getattr(config, "alibi", False):
            raise Undescribed("its scores have a bias by position")
        base: Any = first(model, "model", "transformer")
        self._config, self._family, self._base = config, family, first(base, "language_model") or base
        modules: Any = first(self._base, "layers", "h")
        self._layers_name = next(name for name, module in model.named_modules() if module is modules)
        self.layers: Sequence[DescribedLayer] = [
            DescribedLayer(config, family, layer, number, self._base.rotary_emb) for number, layer in enumerate(modules)
        ]
        self.head: Any = model.get_output_embeddings()
        self.embedding: Any = model.get_input_embeddings()
        self.input_embedding: Any = getattr(self._base, "embed_tokens_per_layer", None)
        """The table of what each id gives to each layer; or None."""
        self.input_projection: Any = getattr(self._base, "per_layer_model_projection", None)
        """The module that projects embeddings to what each layer gets."""
        self._final_norm: Any = first(self._base, "norm", "final_layernorm", "ln_f")
        self._input_norm: Any = getattr(self._base, "per_layer_projection_norm", None)
        self.sizes = self._sizes()
        self._require_sizes()
        self._require_all()

    @property
    def norms(self) -> dict[str, torch.Tensor]:
        """The weights of the norms that are outside the layers."""
        norms = {"norm": self._final_norm, "input_norm": self._input_norm}
        return {name: norm_weights(norm, self._family) for name, norm in norms.items() if norm is not None}

    def rotation(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [C, rotated / 2] of every position of layers of this name, those of long texts last."""
        first, limit = self.sizes.first_context, self.sizes.context_limit
        positions, dummy = torch.arange(limit if first == limit else first + limit)[None], torch.zeros(1)
        options = {"layer_type": name} if name in (getattr(self._config, "layer_types", None) or ()) else {}
        cos_1CD, sin_1CD = rotate_by_length(self._base.rotary_emb.forward, first, dummy, positions, **options)
        half = next(layer.rotated for layer in self.sizes.layers if layer.rotation == name) // 2
        is_repeated = cos_1CD.shape[-1] > half and torch.equal(cos_1CD[..., 0::2], cos_1CD[..., 1::2])
        taken = slice(None, None, 2) if is_repeated else slice(None, half)
        return cos_1CD[0, :, taken].float(), sin_1CD[0, :, taken].float()

    def query_scale(self) -> torch.Tensor | None:
        """Return what the queries of each position are multiplied by [C], as Llama 4 and Ministral 3 have it."""
        rope = getattr(self._config, "rope_parameters", None) or {}
        if not (beta := rope.get("llama_4_scaling_beta")):
            return None
        positions = torch.arange(self.sizes.context_limit)
        return 1 + beta * torch.log(1 + torch.floor(positions / rope["original_max_position_embeddings"]))

    def _sizes(self) -> ModelSizes:
        config, family, layer = self._config, self._family, self.layers[0]
        query_norm = layer.query_norm
        experts = next((each.experts for each in self.layers if each.experts is not None), None)
        norm = layer.norm("norm") or layer.norm("post_norm")
        return ModelSizes(
            hidden=config.hidden_size,
            num_query_heads=config.num_attention_heads,
            vocabulary=len(self.embedding.weight),
            first_context=first_context(config),
            context_limit=context_limit(config),
            layer_inputs=0 if self._input_norm is None else config.hidden_size_per_layer_input,
            eps=first(norm, "eps", "variance_epsilon"),
            scaling=first(layer.attention, "scaling", "inv_norm_factor"),
            activation=self._activation(experts),
            is_gated=experts is not None or len(layer.sizes.sources["gate_up"]) != 1,
            norms_have_mean=has_mean(norm),
            norms_whole=query_norm is not None and query_norm.weight.numel() != layer.sizes.head_size,
            norms_rotated=family.norms_rotated,
            is_parallel=family.is_parallel,
            num_experts=0 if experts is None else len(experts.down_proj),
            experts_per_row=0 if experts is None else first(config, "num_experts_per_tok", "top_k_experts"),
            shares_are_whole=getattr(config, "norm_topk_prob", True),
            scores_are_sigmoid=family.scores_are_sigmoid,
            embedding_scale=self._embedding_scale(),
            residual_scale=getattr(config, "residual_multiplier", None) or 1.0,
            logit_scale=getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0),
            score_cap=getattr(config, "attn_logit_softcapping", None) or 0.0,
            logit_cap=getattr(config, "final_logit_softcapping", None) or 0.0,
            layers_name=self._layers_name,
            layers=[each.sizes for each in self.layers],
        )

    def _activation(self, experts: Any) -> str:
        """Return the kernels' name of what is done with the gate. Raises Undescribed."""
        name = str(first(self._config, "hidden_activation", "hidden_act", "activation"))
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
        sizes, has_query_norm = self.sizes, self.layers[0].query_norm is not None
        widths = {(sizes.num_query_heads * layer.head_size, layer.mlp) for layer in sizes.layers}
        are_odd = any(attended % native.GROUP or mlp % native.GROUP for attended, mlp in widths)
        inputs = self.input_embedding.weight.shape if sizes.layer_inputs else (sizes.vocabulary,)
        problems = {
            "its norms have a mean of an odd size": sizes.norms_have_mean and sizes.hidden % _LANES,
            "its rows see what follows": getattr(self._config, "use_bidirectional_attention", None) in (True, "all"),
            "its heads are normed with a mean": sizes.norms_have_mean and has_query_norm,
            "the widths of its layers differ oddly": len(widths) > 1 and are_odd,
            "its layers get inputs of an odd size": sizes.layer_inputs % native.GROUP,
            "some ids give its layers no inputs": inputs[0] != sizes.vocabulary,
        }
        for layer in sizes.layers:
            problems |= {
                f"a head has {layer.head_size} values": layer.head_size % native.BLOCK or layer.head_size > 512,
                f"{layer.rotated} values of a head are rotated": layer.rotated % (2 * _LANES),
                "its query heads share keys unevenly": sizes.num_query_heads % layer.num_key_heads,
            }
        if problem := next((text for text, is_one in problems.items() if is_one), None):
            raise Undescribed(problem)

    def _embedding_scale(self) -> float:
        if self._family.scales_embeddings:
            return float(torch.tensor(math.sqrt(self._config.hidden_size)).to(self.embedding.weight.dtype))
        return getattr(self._config, "embedding_multiplier", None) or 1.0

    def _require_all(self) -> None:
        """Raise Undescribed when the model has a weight outside its layers that the description does not read."""
        inputs = (self.input_embedding, self.input_projection, self._input_norm)
        known = {id(each) for each in (self.embedding, self.head, self._final_norm, *inputs)}
        inside = {id(module) for layer in self.layers for module in layer.module.modules()}
        for name, module, _ in saved(self._base):
            if id(module) not in known | inside:
                raise Undescribed(f"it has {name}")
        if getattr(self.head, "bias", None) is not None:
            raise Undescribed("its head has a bias")
