"""New rows: shared ids keep theirs exactly, others are made of shared ones."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from omnidraft.transfer.initialisation import average_rows, fvt_rows, matching_pursuit, omp_rows
from omnidraft.vocab.alignment import Alignment
from tests.tiny_pair import Pair


def by_omp(old_DH: Tensor, alignment: Alignment) -> Tensor:
    return omp_rows(old_DH, random((alignment.num_target, 24), seed=1), alignment)


METHODS: dict[str, Callable[[Tensor, Alignment], Tensor]] = {"fvt": fvt_rows, "mean": average_rows, "omp": by_omp}


def random(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_a_shared_token_keeps_its_row_exactly(pair: Pair, method: Callable[[Tensor, Alignment], Tensor]) -> None:
    old_DH = random((pair.alignment.num_draft, 16))
    rows_TH = method(old_DH, pair.alignment)
    num_shared = 0
    for new_id in range(pair.alignment.num_target):
        pieces = pair.alignment.draft_pieces(new_id)
        if len(pieces) == 1:
            assert torch.equal(rows_TH[new_id], old_DH[pieces[0]])
            num_shared += 1
        elif not pieces:
            torch.testing.assert_close(rows_TH[new_id], old_DH.mean(dim=0))
    assert num_shared > 256


def test_the_baseline_gives_every_new_token_the_mean_of_all_rows(pair: Pair) -> None:
    old_DH = random((pair.alignment.num_draft, 16))
    made = torch.from_numpy(pair.alignment.drafts_of_target.lengths != 1)
    assert made.any()
    torch.testing.assert_close(
        average_rows(old_DH, pair.alignment)[made], old_DH.mean(dim=0).expand(int(made.sum()), -1)
    )


def test_a_token_that_is_a_sum_of_shared_ones_for_the_donor_is_their_sum_here(pair: Pair) -> None:
    alignment = pair.alignment
    num_shared = int((alignment.drafts_of_target.lengths == 1).sum())
    donor_TE = torch.zeros(alignment.num_target, num_shared)
    shared = torch.where(torch.from_numpy(alignment.drafts_of_target.lengths == 1))[0]
    donor_TE[shared] = 3 * torch.eye(num_shared)
    made = torch.where(torch.from_numpy(alignment.drafts_of_target.lengths > 1))[0]
    donor_TE[made[0]] = donor_TE[shared[5]] - 2 * donor_TE[shared[9]]
    old_DH = random((alignment.num_draft, 16))
    rows_TH = omp_rows(old_DH, donor_TE, alignment)
    torch.testing.assert_close(rows_TH[made[0]], rows_TH[shared[5]] - 2 * rows_TH[shared[9]], atol=1e-4, rtol=1e-4)


def test_matching_pursuit_equals_the_slow_one_and_comes_nearer_with_every_atom() -> None:
    wanted_ME = random((3, 10))
    unit_MCE = torch.nn.functional.normalize(random((3, 40, 10), seed=1), dim=-1)
    lengths = []
    for num_atoms in (1, 2, 4):
        chosen_MK, weight_MK = matching_pursuit(wanted_ME, unit_MCE, num_atoms)
        made_ME = torch.stack([weight_MK[row] @ unit_MCE[row, chosen_MK[row]] for row in range(3)])
        rest_ME = wanted_ME - made_ME
        lengths.append(rest_ME.norm().item())
        for row in range(3):
            assert chosen_MK[row].tolist() == slow_pursuit(wanted_ME[row], unit_MCE[row], num_atoms)
    assert lengths[0] > lengths[1] > lengths[2]


def slow_pursuit(wanted_E: Tensor, unit_CE: Tensor, num_atoms: int) -> list[int]:
    chosen: list[int] = []
    rest_E = wanted_E
    for _ in range(num_atoms):
        chosen.append(max(set(range(len(unit_CE))) - set(chosen), key=lambda c: float((unit_CE[c] @ rest_E).abs())))
        fit = torch.linalg.lstsq(unit_CE[chosen].T, wanted_E[:, None]).solution[:, 0]
        rest_E = wanted_E - fit @ unit_CE[chosen]
    return chosen
