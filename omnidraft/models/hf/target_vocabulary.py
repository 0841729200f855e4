"""A drafter with the target's vocabulary: its embeddings and head indexed anew, its layers as they are.

Engines that draft with a model of the target's own tokenizer take such a drafter. Each target token gets the mean of
the rows of the draft tokens that spell it. Special tokens have those of the special token with the same role, and ids
that no draft token spells, padding above all, the mean of all rows.
Shapes: D draft ids, T target ids, H hidden size.
Source: mean initialisation, "FVT" in https://arxiv.org/abs/2402.01035, section 3.1.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from omnidraft.vocab.alignment import Alignment, PackedLists
from omnidraft.vocab.tokenizer import Vocabulary

_CONFIGURED_ROLES = ("bos", "eos", "pad")


@torch.no_grad()
def adopt_target_vocabulary(model: PreTrainedModel, alignment: Alignment, target: Vocabulary) -> None:
    """Index the model's embeddings and head by target ids, in place; tied matrices stay tied.

    Args:
        alignment: of the model's own vocabulary and the target's.
    """
    pieces = alignment.drafts_of_target
    embedding_TH = mean_rows(model.get_input_embeddings().weight, pieces)  # type: ignore[arg-type]
    head_TH = mean_rows(model.get_output_embeddings().weight, pieces)  # type: ignore[union-attr, arg-type]
    replace_vocabulary(model, embedding_TH, head_TH, target)


@torch.no_grad()
def replace_vocabulary(model: PreTrainedModel, embedding_TH: Tensor, head_TH: Tensor, target: Vocabulary) -> None:
    """Give the model these embeddings and this head in place, and the special ids of their vocabulary.

    Args:
        head_TH: equal to the embeddings where the model ties both.
    """
    model.resize_token_embeddings(len(embedding_TH), mean_resizing=False)
    model.get_input_embeddings().weight.copy_(embedding_TH)  # type: ignore[operator, union-attr]
    model.get_output_embeddings().weight.copy_(head_TH)  # type: ignore[union-attr]
    config = model.config.get_text_config()
    for role in _CONFIGURED_ROLES:
        setattr(config, f"{role}_token_id", target.roles.get(role))


def mean_rows(weight_DH: Tensor, pieces: PackedLists) -> Tensor:
    """Return the mean of the rows of each of T lists, float32 [T, H]; the mean of all rows for an empty list."""
    rows_DH = weight_DH.detach().float()
    mean_TH = torch.nn.functional.embedding_bag(
        torch.from_numpy(pieces.ids).long(),
        rows_DH,
        torch.from_numpy(pieces.offsets),
        mode="mean",
        include_last_offset=True,
    )
    mean_TH[torch.from_numpy(pieces.lengths == 0)] = rows_DH.mean(dim=0)
    return mean_TH
