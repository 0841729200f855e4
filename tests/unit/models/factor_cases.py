"""Random low-rank factors of tiny models, and the same model with factors merged into its weights."""

import copy

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnidraft.models.hf.serving_tensors import apply_serving_tensors
from omnidraft.snapshots.low_rank import A, B


def random_factors(model: PreTrainedModel, seed: int, rank: int = 5, scale: float = 0.2) -> dict[str, Tensor]:
    """Factors of every linear module of the layers but gates of one number, in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        is_inside = ".layers." in name or ".h." in name
        if isinstance(module, torch.nn.Linear) and is_inside and module.out_features > 1:
            tensors[name + A] = scale * torch.randn(rank, module.in_features, generator=generator)
            tensors[name + B] = scale * torch.randn(module.out_features, rank, generator=generator)
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def merged(model: PreTrainedModel, factors: dict[str, Tensor]) -> PreTrainedModel:
    """A copy of the model with the factors in its weights."""
    own = copy.deepcopy(model)
    apply_serving_tensors(own, factors, train="lora")
    return own
