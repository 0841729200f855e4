"""What one layer of a decoder of transformers computes, read from its family, its modules and its configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from omnidraft.models.native import library as native
from omnidraft.models.native.families import Family
from omnidraft.models.native.packed_model import LayerSizes, Source

_NORMS = (
    "norm", "post_norm", "mlp_norm", "post_mlp_norm", "post_input_norm", "post_dense_norm", "expert_norm",
    "post_expert_norm",
)  # fmt: skip


class Undescribed(Exception):
    """The native pass does not compute this model; the message says why."""


class DescribedLayer:
    """A layer that the native pass computes. Raises Undescribed for others."""

    def __init__(self, config: Any, family: Family, layer: Any, number: int, rotary: Any) -> None:
        self._config, self._family, self._number = config, family, number
        self.module = layer
        self.attention, mlp = getattr(layer, family.attention), getattr(layer, family.mlp)
        self._around_experts = next((each for each in (mlp, layer) if hasattr(each, "experts")), None)
        self.experts: Any = getattr(self._around_experts, "experts", None)
        """The module that stacks the matrices of all experts; or None."""
        beside = [f"{family.mlp}.{name}" for name in ("shared_expert", "shared_experts")]
        paths = beside if self._around_experts is mlp else [family.mlp]
        self._mlp_path = next((path for path in paths if _submodule(layer, path) is not None), None)
        self.query_norm = first(self.attention, "q_norm", "query_layernorm")
        self.sizes = self._sizes(rotary)
        self._require_all()

    def norm(self, name: str) -> Any:
        """Return the module of this norm; None where there is none."""
        module = getattr(self._family, name)
        return None if module is None else first(self.module, module, "input_layernorm")

    def norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the names and weights of its norms."""
        for name in _NORMS:
            if (module := self.norm(name)) is not None:
                yield name, norm_weights(module, self._family)
        for name, module in (("query_norm", self.query_norm), ("key_norm", self._key_norm)):
            if module is not None:
                yield name, norm_weights(module, self._family, padded=False)
        if hasattr(self.attention, "v_norm"):
            yield "value_norm", torch.ones(self.sizes.head_size)

    @property
    def _router(self) -> Any:
        return first(self._around_experts, "gate", "router")

    @property
    def _chosen_by(self) -> dict[str, Any]:
        """What chooses among its experts and weighs them, by the kernels' names, as the model has it."""
        router, gate = self._router, first(self._around_experts, "shared_expert_gate")
        owners = (first(router, "moe_statics"), router, self._around_experts)
        biases = (first(each, "e_score_correction_bias") for each in owners)
        found = {
            "router": getattr(router, "proj", router).weight,
            "router_bias": first(router, "bias"),
            "router_norm": first(router, "scale"),
            "choice_bias": next((bias for bias in biases if bias is not None), None),
            "expert_scale": first(router, "per_expert_scale", "routed_scaling_factor"),
            "dense_gate": first(gate, "weight"),
        }
        return {name: each for name, each in found.items() if each is not None}

    def routing(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what chooses among its experts and weighs them, by the kernels' names."""
        computed: Mapping[str, Callable[[Any], torch.Tensor]] = {
            "router": _padded,
            "router_norm": lambda scale: _padded(scale * self._router.scalar_root_size),
            "choice_bias": torch.flatten,
            "expert_scale": lambda scale: torch.as_tensor(scale).expand(len(self.experts.down_proj)),
            "dense_gate": lambda weight_1K: _padded(weight_1K[0]),
        }
        for name, weight in self._chosen_by.items():
            yield name, computed.get(name, torch.Tensor.detach)(weight).detach().float()

    @property
    def _key_norm(self) -> Any:
        return first(self.attention, "k_norm", "key_layernorm")

    @property
    def sinks(self) -> torch.Tensor | None:
        """The score of each query head that no value has; or None."""
        return first(self.attention, "sinks")

    def expert_matrices(self) -> Iterator[tuple[str, Sequence[Sequence[torch.Tensor]]]]:
        """Yield the names of its matrices and biases, and those of each expert, whose blocks are in turns."""
        for name in ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"):
            if (stacked := getattr(self.experts, name, None)) is None:
                continue
            each = stacked.detach().unbind()
            if self._family.is_transposed and stacked.dim() == 3:
                each = tuple(matrix.T for matrix in each)
            turns = 2 if name.startswith("gate_up") else 1
            if self._family.is_transposed:
                yield (
                    f"expert_{name.replace('_proj', '')}",
                    [[one[turn::turns] for turn in range(turns)] for one in each],
                )
            else:
                yield f"expert_{name.replace('_proj', '')}", [one.chunk(turns) for one in each]

    def _sizes(self, rotary: Any) -> LayerSizes:
        config, family, attention = self._config, self._family, self.attention
        heads = config.num_attention_heads
        key_heads = heads // attention.num_key_value_groups if config.model_type != "falcon" else attention.num_kv_heads
        head_size = getattr(attention, "head_dim", None) or config.hidden_size // heads
        path, mlp = self._mlp_path, _submodule(self.module, self._mlp_path or "")
        gate_up = [] if path is None else _gate_up(path, mlp)
        keys_of = self._keys_of()
        inputs = getattr(config, "hidden_size_per_layer_input", None)
        kinds = getattr(config, "layer_types", None)
        inv_freq = first(rotary, f"{kinds[self._number]}_inv_freq" if kinds else "inv_freq", "inv_freq")
        return LayerSizes(
            num_key_heads=key_heads,
            head_size=head_size,
            mlp=gate_up[0].num_rows if gate_up else 0,
            expert_mlp=0 if self.experts is None else self.experts.down_proj.shape[2 - family.is_transposed],
            rotated=2 * len(inv_freq),
            window=self._window(),
            rotation=self._rotation(),
            keys_of=keys_of,
            scale=float(getattr(self.module, "layer_scalar", 1.0)),
            sources={
                "qkv": _qkv(family, config, attention, heads, key_heads, head_size)[: 1 if keys_of is not None else 3],
                "out": [_whole(family.attention, attention, "o_proj", "dense")],
                "gate_up": gate_up,
                "down": []
                if path is None
                else [_whole(path, mlp, "down_proj", "c_proj", "dense_4h_to_h", "output_linear")],
                "input_gate": [_whole("", self.module, "per_layer_input_gate")] if inputs else [],
                "input_out": [_whole("", self.module, "per_layer_projection")] if inputs else [],
            },
        )

    def _keys_of(self) -> int | None:
        if not getattr(self.attention, "is_kv_shared_layer", False):
            return None
        kinds = self._config.layer_types[: -self._config.num_kv_shared_layers]
        return max(number for number, kind in enumerate(kinds) if kind == self._config.layer_types[self._number])

    def _rotation(self) -> str | None:
        config = self._config
        is_rotated = getattr(config, "position_embedding_type", "rope") == "rope"
        if self._family.is_unrotated(config, self._number) or not is_rotated:
            return None
        ropes = (getattr(config, "rope_parameters", None) or {}).values()
        return config.layer_types[self._number] if any(isinstance(each, Mapping) for each in ropes) else "all"

    def _window(self) -> int:
        config = self._config
        kinds = getattr(config, "layer_types", None)
        kind = None if kinds is None else kinds[self._number]
        if kind not in (None, "full_attention", "sliding_attention", "attention"):
            raise Undescribed(f"a layer is of the kind {kind}")
        has_window = getattr(config, "use_sliding_window", True) if kind is None else kind == "sliding_attention"
        return (getattr(config, "sliding_window", None) or 0) if has_window else 0

    def _require_all(self) -> None:
        """Raise Undescribed when the layer has a weight that the description does not read."""
        read = {source.module for sources in self.sizes.sources.values() for source in sources}
        known = {id(each) for each in (self.query_norm, self._key_norm, *(self.norm(name) for name in _NORMS))}
        weights: list[Any] = [self.sinks, getattr(self.module, "layer_scalar", None)]
        if self._around_experts is not None:
            if getattr(self._router, "num_group", 1) > 1:
                raise Undescribed("its experts are chosen by groups")
            known.add(id(self.experts))
            weights += self._chosen_by.values()
        known |= set(map(id, weights))
        for name, module, weight in saved(self.module):
            if name.rpartition(".")[0] not in read and not {id(module), id(weight)} & known:
                raise Undescribed(f"its layers have a {name}")


def first(module: Any, *names: str) -> Any:
    """Return the first of these attributes that is there; None where none is."""
    return next((found for name in names if (found := getattr(module, name, None)) is not None), None)


def saved(module: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield the name, the owner and the values of each parameter and of each buffer that is saved with them."""
    for name, values in module.state_dict(keep_vars=True).items():
        yield name, module.get_submodule(name.rpartition(".")[0]), values


def _submodule(layer: Any, path: str) -> Any:
    try:
        return layer.get_submodule(path)
    except AttributeError:
        return None


def _padded(tensor: torch.Tensor) -> torch.Tensor:
    """Return these weights with whole groups of inputs."""
    return nn.functional.pad(tensor, (0, -tensor.shape[-1] % native.GROUP))


def has_mean(norm: Any) -> bool:
    """Whether a norm subtracts the mean."""
    return "RMS" not in type(norm).__name__


def norm_weights(norm: Any, family: Family, *, padded: bool = True) -> torch.Tensor:
    """Return the weights of a norm, followed by its bias in one that subtracts the mean."""
    weight = norm.weight.detach().float() + family.adds_one
    bias = getattr(norm, "bias", None)
    rows = [weight, torch.zeros_like(weight) if bias is None else bias.detach().float()][: 1 + has_mean(norm)]
    return torch.cat([nn.functional.pad(row, (0, -len(row) % native.GROUP if padded else 0)) for row in rows])


def _whole(path: str, parent: Any, *names: str) -> Source:
    name = next(name for name in names if hasattr(parent, name))
    return Source(f"{path}.{name}".removeprefix("."), [[0, len(getattr(parent, name).weight)]])


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
        queries = _whole(path, attention, "q_proj")._replace(is_paired=paired)
        if not hasattr(attention, "k_proj"):
            return [queries]
        keys = _whole(path, attention, "k_proj")
        has_values = getattr(attention, "v_proj", None) is not None
        values = _whole(path, attention, "v_proj") if has_values else keys
        return [queries, keys._replace(is_paired=paired), values]
    name = next(name for name in ("qkv_proj", "query_key_value") if hasattr(attention, name))
    counts, groups = (heads, key_heads, key_heads), 1
    if getattr(config, "new_decoder_architecture", False) or (name == "query_key_value" and key_heads == heads):
        counts, groups = (heads // key_heads, 1, 1), key_heads  # the query heads of a group, then its key and value
    ends = [size * sum(counts[:number]) for number in range(4)]
    starts = [group * ends[3] for group in range(groups)]
    spans = [[[start + ends[each], start + ends[each + 1]] for start in starts] for each in range(3)]
    return [Source(f"{path}.{name}", spans[each], paired and each < 2) for each in range(3)]
