"""A model that the caller has loaded, lent for the time of a call: it is given back as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from omnidraft.errors import ModelError
from omnidraft.models.hf.attention import rotary_modules, share_key_heads, tell_long_texts_apart


def require_lendable(model: PreTrainedModel) -> None:
    """Raise ModelError for a model whose trees cannot be scored."""
    if model.config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} has an encoder; drafts are for models that only decode")
    implementation = model.config._attn_implementation
    if implementation != "sdpa":
        raise ModelError(
            f"the model's attention is {implementation!r}, which takes no masks of trees: load it with "
            "attn_implementation='sdpa'"
        )


@contextmanager
def lent(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the model drops nothing out and its attention takes the keys of several texts, of any length."""
    in_training = [module for module in model.modules() if module.training]
    implementation: Any = model.config._attn_implementation
    rotations = [(each, vars(each).get("forward")) for each in rotary_modules(model)]
    share_key_heads(model)
    tell_long_texts_apart(model)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(implementation)
        for module, forward in rotations:
            del module.forward
            if forward is not None:
                module.forward = forward
        for module in in_training:
            module.training = True
