"""A drafter in the target's vocabulary: every row is the mean of its pieces, and what was tied stays tied."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from omnidraft.models.hf.target import load_model
from omnidraft.models.hf.target_vocabulary import adopt_target_vocabulary, mean_rows
from omnidraft.vocab.alignment import PackedLists
from tests.tiny_pair import make_pair

NUM_ROWS = 7


def naive(weight: Tensor, pieces: list[list[int]]) -> Tensor:
    return torch.stack([(weight[each] if each else weight).float().mean(0) for each in pieces])


@given(st.lists(st.lists(st.integers(0, NUM_ROWS - 1), max_size=4), min_size=1, max_size=9))
def test_a_row_is_the_mean_of_its_pieces_and_of_all_rows_without_any(pieces: list[list[int]]) -> None:
    weight = torch.randn(NUM_ROWS, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    torch.testing.assert_close(mean_rows(weight, PackedLists.of(pieces)), naive(weight, pieces))


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_and_head_are_indexed_by_the_targets_ids(tmp_path: Path, tied: bool) -> None:
    pair = make_pair(tmp_path, tied=tied)
    model = load_model(pair.folder).float()  # type: ignore[no-untyped-call]
    matrices = [model.get_input_embeddings(), model.get_output_embeddings()]
    pieces = [list(pair.alignment.draft_pieces(token)) for token in range(pair.alignment.num_target)]
    expected = [naive(each.weight, pieces) for each in matrices]  # type: ignore[union-attr, arg-type]
    adopt_target_vocabulary(model, pair.alignment, pair.target.vocabulary)
    made = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]  # type: ignore[union-attr]
    for weight, rows in zip(made, expected, strict=True):
        torch.testing.assert_close(weight, rows)
    assert (made[0] is made[1]) == tied
    assert model.config.vocab_size == pair.alignment.num_target
    assert model.config.eos_token_id == pair.target.vocabulary.roles["eos"]
    assert (
        model(input_ids=torch.tensor([[pair.alignment.num_target - 1]])).logits.shape[-1] == pair.alignment.num_target
    )
