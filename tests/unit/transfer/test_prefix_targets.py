"""Targets by old pieces: exact where a student is, whatever its tokens are made of."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omnidraft.distill.examples.targets import PrefixTargets
from omnidraft.distill.training.prefix import prefix_kl
from omnidraft.transfer.prefix_targets import PrefixBuckets
from omnidraft.transfer.texts import AlignedText
from omnidraft.vocab.alignment import Alignment, PackedLists

START, A, B, C = range(4)
"""The old ids. The new ones have the same numbers, and more."""
SPELLED = [(START,), (A,), (B,), (C,), (A, B), (A, B, C), (C, C)]
"""The old pieces of each new id. The beginning of each is an id too."""
P_D = np.array([0.0, 0.5, 0.3, 0.2])
"""What the old model expects, whatever it has read."""

BUCKETS = PrefixBuckets(
    Alignment("of a test", PackedLists.of([(old,) for old in range(4)]), PackedLists.of(SPELLED)),
)


def tokenise(old_ids: list[int]) -> list[int]:
    """Return the longest new ids, as merges make them."""
    new_ids, at = [], 0
    while at < len(old_ids):
        new_ids.append(max((t for t in range(len(SPELLED)) if starts(old_ids[at:], SPELLED[t])), key=length))
        at += length(new_ids[-1])
    return new_ids


def starts(ids: list[int], pieces: tuple[int, ...]) -> bool:
    return tuple(ids[: len(pieces)]) == pieces


def length(token: int) -> int:
    return len(SPELLED[token])


def aligned(old_ids: list[int]) -> AlignedText:
    new_ids = tokenise(old_ids)
    ends = np.cumsum([length(token) for token in new_ids])
    return AlignedText(np.array(old_ids), np.array(new_ids), ends - 1, np.arange(len(new_ids)), int(ends[-1]) - 1)


def student_after(token: int) -> np.ndarray:
    """Return q of the next new id: what old ids come next, none that would have made this one longer, until none more
    makes the next one longer."""
    forbidden = {longer[-1] for longer in SPELLED if longer[:-1] == SPELLED[token]}
    q_V = np.array([likelihood(pieces) * (pieces[0] not in forbidden) for pieces in SPELLED])
    return q_V / q_V.sum()


def likelihood(pieces: tuple[int, ...]) -> float:
    longer = sum(P_D[other[-1]] for other in SPELLED if other[:-1] == pieces)
    return float(np.prod(P_D[list(pieces)]) * (1 - longer))


def of_text(text: AlignedText) -> PrefixTargets[np.ndarray]:
    with np.errstate(divide="ignore"):
        logits_D = torch.from_numpy(np.log(P_D)).float()
    return BUCKETS.of_text(text, logits_D.expand(len(text.old_ids_O), -1))


def tensors(targets: PrefixTargets[np.ndarray]) -> PrefixTargets[torch.Tensor]:
    arrays = (targets.row_N, targets.low_NB, targets.high_NB, targets.p_NS, targets.p_rest_N, targets.order_V)
    return PrefixTargets(*map(torch.from_numpy, arrays))


def spans(targets: PrefixTargets[np.ndarray], number: int) -> Iterator[tuple[set[int], float]]:
    """Yield the new ids of each bucket, and their mass."""
    for low, high, p in zip(targets.low_NB[number, 1:], targets.high_NB[number, 1:], targets.p_NS[number], strict=True):
        if high > low:
            yield set(targets.order_V[low:high].tolist()), float(p)


@given(st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=12))
def test_a_student_with_the_same_distribution_of_texts_has_nothing_to_learn(ids: list[int]) -> None:
    text = aligned([START, *ids])
    targets = of_text(text)
    q_TV = np.array([student_after(token) for token in text.new_ids_T])
    logits_TV = torch.from_numpy(np.log(np.maximum(q_TV, 1e-30))).float().requires_grad_()
    loss_N = prefix_kl(logits_TV, tensors(targets))
    loss_N.sum().backward()
    assert loss_N.abs().max() < 1e-5
    assert logits_TV.grad.abs().max() < 1e-5


def test_inside_a_token_what_ends_there_gets_all_that_no_longer_token_goes_on_with() -> None:
    targets = of_text(aligned([START, A, B, C]))
    assert targets.row_N.tolist() == [0, 0, 0]
    assert [dict_of(targets, number) for number in range(3)] == [
        {(1, 4, 5): 0.5, (2,): 0.3, (3, 6): 0.2},
        {(1,): 0.7, (4, 5): 0.3},
        {(4,): 0.8, (5,): 0.2},
    ]


def dict_of(targets: PrefixTargets[np.ndarray], number: int) -> dict[tuple[int, ...], object]:
    return {tuple(sorted(ids)): pytest.approx(p) for ids, p in spans(targets, number) if p > 0}


def test_a_text_does_not_go_on_with_what_would_have_made_its_last_token_longer() -> None:
    targets = of_text(aligned([START, A, C]))
    assert dict_of(targets, 1) == {(1, 4, 5): 0.5 / 0.7, (3, 6): 0.2 / 0.7}


def test_several_new_ids_for_one_old_one_are_met_at_their_ends_alone() -> None:
    pieces = PackedLists.of([(0,), (1,), (2,), (1, 2)])
    buckets = PrefixBuckets(Alignment("of a test", pieces, PackedLists.of([(0,), (1,), (2,)])))
    text = AlignedText(np.array([0, 3]), np.array([0, 1, 2]), np.array([0, 1]), np.array([0, 2]), 2)
    targets = buckets.of_text(text, torch.tensor([[0.0, 0.5, 0.1, 0.4]]).log().expand(2, -1))
    assert targets.row_N.tolist() == [0]
    assert {tuple(ids): pytest.approx(p) for ids, p in spans(targets, 0) if p > 0} == {(1,): 0.9, (2,): 0.1}


def test_where_the_old_model_expects_only_what_the_text_cannot_be_nothing_is_learned() -> None:
    text = aligned([START, A, C])
    logits_OD = torch.full((3, 4), -40.0)
    logits_OD[0, A] = logits_OD[1, B] = 0.0
    assert of_rows(text, logits_OD) == [0]
    logits_OD[1, C] = 0.0
    assert of_rows(text, logits_OD) == [0, 1]


def of_rows(text: AlignedText, logits_OD: torch.Tensor) -> list[int]:
    rows: list[int] = BUCKETS.of_text(text, logits_OD).row_N.tolist()
    return rows
