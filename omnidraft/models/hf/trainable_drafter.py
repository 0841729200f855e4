"""The trainable drafter: a transformers model that learns all its weights, or LoRA factors, in float32.

Its passes are computed in float32 or in bfloat16; see trained_weights.py.

Shapes: R rows of a pass over several texts, K rows that they see, N chosen rows, H hidden size, V the drafter's
vocabulary; of LoRA factors, R is the rank.
Nothing is random after loading: dropout is off, so equal batches give equal gradients.
A pass rests (throttle.py) after each linear layer, forward and backward, so that whoever learns beside requests can
wait there.

Processors with AMX or AVX-512 BF16 multiply bfloat16 two to four times as fast as float32; on others torch imitates it
slowly. A trial of a step's products decides, whose times are kept: a measurement of the moment differs under load, and
two learners of one machine would compute differently.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, LoraModel
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from omnidraft import throttle
from omnidraft.errors import ConfigError, ContractError
from omnidraft.models.hf.attention import AttentionMasks, Masks, first_context
from omnidraft.models.hf.pretrained import default_dtype_lock
from omnidraft.models.hf.serving_tensors import Train
from omnidraft.models.hf.trained_weights import TrainedWeights
from omnidraft.models.hf.training_attention import PackedTextCache, take_texts_apart
from omnidraft.models.probe import choice
from omnidraft.ports import PackedTexts, Precision
from omnidraft.snapshots.low_rank import SCALE, A, B, factored_modules

logger = logging.getLogger(__name__)


_FASTER = 1.5
"""Products must be so much faster: rounding the weights and converting their gradients take a tenth of a step."""


def automatic_precision() -> Precision:
    """Return the format for a new learner on this processor."""
    seconds = choice.training_seconds()
    return "bfloat16" if _FASTER * seconds.get("bfloat16", float("inf")) < seconds["float32"] else "float32"


def usable_precision(wanted: Precision) -> Precision:
    """Return `wanted`, or float32 with a warning where torch cannot multiply it."""
    if wanted in choice.torch_products().outcome.seconds:
        return wanted
    logger.warning("torch cannot multiply matrices in %s here, so learning goes on in float32", wanted)
    return "float32"


class TransformersTrainable:
    """Implements ports.TrainableDrafter."""

    def __init__(self, causal: Any, precision: Precision = "float32", factors: LoraModel | None = None) -> None:
        """
        Args:
            causal: a causal language model in float32.
            precision: the format of its passes; weights are learned in float32.
            factors: those that it learns; None learns all weights that require a gradient.

        Raises:
            ConfigError: the model computes its logits in a way that is not known here.
            ModelError: its passes cannot be served.
        """
        config = causal.config.get_text_config()
        self._attention = AttentionMasks(causal)
        self.context_limit = first_context(config)
        self._model, self._factors = causal, factors
        self._decoder = _decoder(causal)
        causal.get_input_embeddings().padding_idx = None  # would keep that token from learning; nothing is padded
        self._head = causal.get_output_embeddings()
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._scale = getattr(config, "logit_scale", None) or 1 / getattr(config, "logits_scaling", 1.0)
        self._require_own_logits(causal)
        self.vocab_size: int = self._head.weight.shape[0]
        self.hidden_size: int = self._head.weight.shape[1]
        self._num_layers: int = config.num_hidden_layers
        self._takes_texts_apart = take_texts_apart(causal)
        self._take_texts_together_where_needed(causal)
        for name, module in causal.named_modules():
            if _is_linear(name, module):
                module.register_forward_hook(_rest)
        self._weights = TrainedWeights(causal, serving_name)
        self._weights.compute_in(precision)

    @property
    def precision(self) -> Precision:
        return self._weights.precision

    def compute_in(self, precision: Precision) -> None:
        self._weights.compute_in(usable_precision(precision))

    def trained(self) -> Mapping[str, nn.Parameter]:
        return self._weights.masters

    def into_model(self) -> PreTrainedModel:
        """Return the model in float32 with all that was learned merged into it. This object is of no use afterwards."""
        self._weights.compute_in("float32")
        if self._factors is not None:
            self._factors.merge_and_unload()
        merged: PreTrainedModel = self._model
        return merged

    def hidden(self, texts: PackedTexts) -> Tensor:
        """Run the context without gradients, then the rest, which attends to its keys and values."""
        self._weights.refresh()
        context = texts.num_context
        cache = PackedTextCache(self._num_layers) if self._takes_texts_apart else DynamicCache()
        with torch.no_grad():
            if context:
                self._rows(texts, slice(0, context), cache)
        return self._rows(texts, slice(context, len(texts.ids_R)), cache)

    def _rows(self, texts: PackedTexts, rows: slice, cache: Cache) -> Tensor:
        if isinstance(cache, PackedTextCache):
            cache.begin(texts, rows)
        out = self._decoder(
            input_ids=texts.ids_R[None, rows],
            position_ids=texts.position_R[None, rows],
            attention_mask=self._masks(texts, rows),
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state[0]

    def _masks(self, texts: PackedTexts, rows: slice) -> Masks:
        """Return the attention mask [1, 1, rows, keys], by kind of layer where some layers have a window.

        A row's keys are the positions of its own text, or all rows up to the last for a model that takes them together.
        """
        position_R = texts.position_R[rows]
        if self._takes_texts_apart:
            distance_RK = position_R[:, None] - torch.arange(int(position_R.max()) + 1)
            sees_RK = distance_RK >= 0
        else:
            distance_RK = position_R[:, None] - texts.position_R[None, : rows.stop]
            sees_RK = (texts.text_R[rows, None] == texts.text_R[None, : rows.stop]) & (distance_RK >= 0)
        return self._attention.of(sees_RK, distance_RK)

    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        return {name: (layer.out_features, layer.in_features) for name, layer in self._linear_layers().items()}

    @contextmanager
    def factored(self, factors: Mapping[str, Tensor]) -> Iterator[None]:
        layers, learned = self._linear_layers(), [each for each in self._model.parameters() if each.requires_grad]
        modules = factored_modules(self.linear_shapes(), factors)
        hooks = [layers[name].register_forward_hook(_adder(factors[name + A], factors[name + B])) for name in modules]
        for parameter in learned:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for parameter in learned:
                parameter.requires_grad_()

    def _linear_layers(self) -> dict[str, nn.Linear]:
        """Return the linear layers of the drafter's layers, by their names in a snapshot."""
        inside = set(_layers(self._decoder).modules())
        return {
            name.removesuffix(".base_layer"): module
            for name, module in self._model.named_modules()
            if _is_linear(name, module) and module in inside and ".lora_" not in name
        }

    def logits(self, hidden_NH: Tensor) -> Tensor:
        logits_NV: Tensor = self._head(hidden_NH)
        if self._scale != 1.0:
            logits_NV = logits_NV * self._scale
        if self._softcap is None:
            return logits_NV
        return torch.tanh(logits_NV.float() / self._softcap) * self._softcap

    @torch.no_grad()
    def _take_texts_together_where_needed(self, causal: Any) -> None:
        """Let a model that computes with its keys before it attends to them (DeepSeek's) see all texts of a pass."""
        if self._takes_texts_apart:
            zero_R = torch.zeros(2, dtype=torch.long)
            try:
                self._rows(
                    PackedTexts(zero_R, torch.arange(2), zero_R, 0), slice(0, 2), PackedTextCache(self._num_layers)
                )
            except ContractError:
                causal.set_attn_implementation("sdpa")
                self._takes_texts_apart = False

    @torch.no_grad()
    def _require_own_logits(self, causal: Any) -> None:
        ids = torch.arange(min(4, causal.get_input_embeddings().num_embeddings))[None]
        logits_NV = self.logits(self._decoder(input_ids=ids).last_hidden_state[0])
        if not torch.allclose(logits_NV, causal(input_ids=ids).logits[0].float(), rtol=1e-3, atol=1e-3):
            raise ConfigError(f"{type(causal).__name__} does more between its head and its logits than can be learned")

    def serving_tensors(self) -> dict[str, Tensor]:
        dtype = torch.bfloat16 if self._factors is None else torch.float32
        return {name: parameter.detach().to(dtype, copy=True) for name, parameter in self.trained().items()}


def load_trainable(
    folder: Path, *, train: Train, rank: int, seed: int, precision: Precision | Literal["auto"] = "float32"
) -> TransformersTrainable:
    """Load the drafter of a model folder for training. The seed initialises the LoRA factors, nothing else.

    Args:
        precision: the format of its passes; `auto` is the fastest that works here.

    Raises:
        ModelError: torch computes nothing right here, or not in this precision; or the folder holds no causal language
            model that transformers can load, or its weights are incomplete.
    """
    from omnidraft.models.hf.pretrained import causal_lm

    choice.torch_products().require("float32" if precision == "auto" else precision)
    model = causal_lm(folder, dtype=torch.float32)
    return _trainable(model, train, rank, seed, automatic_precision() if precision == "auto" else precision)


def trainable_with_embeddings(
    model: PreTrainedModel, *, train: Train, rank: int, seed: int, precision: Precision
) -> TransformersTrainable:
    """Make a loaded float32 model trainable. With LoRA its embeddings and its head learn all their weights as well."""
    return _trainable(model, train, rank, seed, precision, model.get_input_embeddings(), model.get_output_embeddings())


def _trainable(
    model: PreTrainedModel, train: Train, rank: int, seed: int, precision: Precision, *learned: Any
) -> TransformersTrainable:
    """`learned`: modules that learn all their weights beside LoRA factors."""
    model.eval().requires_grad_(train == "full")
    factors = _with_lora(model, rank, seed) if train == "lora" else None
    for module in learned:
        module.requires_grad_()
    return TransformersTrainable(model, precision, factors)


def _adder(a_RK: Tensor, b_NR: Tensor) -> Callable[[nn.Module, tuple[Any, ...], Tensor], Tensor]:
    """Return a hook that adds factors to the output of a linear layer, in the format of the pass."""

    def add(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        reduced = nn.functional.linear(inputs[0], a_RK.to(inputs[0].dtype))
        return output + SCALE * nn.functional.linear(reduced, b_NR.to(reduced.dtype))

    return add


def _rest(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Rest after a layer, and again when the gradient of its output is known."""
    throttle.rest()
    if output.requires_grad:
        output.register_hook(_rest_backward)


def _rest_backward(grad: Tensor) -> None:
    throttle.rest()


def serving_name(name: str) -> str:
    """Return the name of a parameter without the parts that peft adds."""
    return name.replace(".default.", ".")


def _decoder(causal: Any) -> Any:
    """Return what computes the last hidden states."""
    found = causal.get_decoder()
    return causal.model if found is causal or isinstance(found, nn.Linear) else found


def _layers(decoder: nn.Module) -> nn.ModuleList:
    return next(module for module in decoder.modules() if isinstance(module, nn.ModuleList))


def _is_linear(name: str, module: nn.Module) -> bool:
    """Return whether it gives several products, and is no part of what chooses among experts."""
    return isinstance(module, nn.Linear) and "router" not in name and module.out_features > 1


def _with_lora(model: PreTrainedModel, rank: int, seed: int) -> LoraModel:
    """Add factors to the linear layers. peft gets the layers alone: of a whole model it takes experts along."""
    layers = _layers(_decoder(model))
    names = [name for name, module in layers.named_modules() if _is_linear(name, module)]
    if any(isinstance(module, Conv1D) for module in layers.modules()):  # whose weights are the other way round
        raise ConfigError(f"{type(model).__name__} learns no LoRA factors: set learner.train = 'full'")
    config = LoraConfig(r=rank, lora_alpha=int(SCALE * rank), target_modules=names, lora_dropout=0.0)
    with default_dtype_lock, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LoraModel(layers, config, "default").eval()
