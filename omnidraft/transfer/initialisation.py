"""Rows of embeddings and head for the ids of a new tokenizer.

Whatever the method, an id whose bytes, or whose role, one old id has gets exactly that id's row, and an id that the old
tokenizer cannot spell (padding, a control token of no known role) gets the mean of all rows.
Shapes: D old ids, T new ids, H hidden size; M new ids to make, S shared ids, E hidden size of the donor, C candidates,
K atoms chosen of them.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from omnidraft.models.hf.target_vocabulary import mean_rows
from omnidraft.vocab.alignment import Alignment

Method = Literal["fvt", "omp", "mean"]
NUM_ATOMS = 8
"""Shared tokens that a new one is made of."""
NUM_CANDIDATES = 128
"""Shared tokens among which these are searched: those most similar to the new one. All of them would take hours."""
_BLOCK = 256
_RIDGE = 1e-6


def fvt_rows(old_DH: Tensor, alignment: Alignment) -> Tensor:
    """Return the mean of the rows of the old ids that spell each new one.

    Source: Fast Vocabulary Transfer as in https://arxiv.org/abs/2402.01035, section 3.1.
    """
    return mean_rows(old_DH, alignment.drafts_of_target)


def average_rows(old_DH: Tensor, alignment: Alignment) -> Tensor:
    """Return the mean of all old rows for every id that is not shared: the baseline of the others."""
    rows_TH = fvt_rows(old_DH, alignment)
    rows_TH[torch.from_numpy(alignment.drafts_of_target.lengths > 1)] = old_DH.detach().float().mean(dim=0)
    return rows_TH


def omp_rows(
    old_DH: Tensor, donor_TE: Tensor, alignment: Alignment, *, advance: Callable[[int], None] = lambda done: None
) -> Tensor:
    """Write each new id as a sum of a few shared ids in the donor's space, and add up the same ids' old rows.

    Source: https://arxiv.org/abs/2506.06607, section 3 (mergekit's tokensurgeon); the candidates are ours.

    Args:
        donor_TE: the same matrix of the model that the tokenizer comes from.
        advance: is called with the number of ids that were made.
    """
    lengths_T = torch.from_numpy(alignment.drafts_of_target.lengths)
    partner_T = torch.from_numpy(alignment.direct_draft_T)
    shared_S, made_M = torch.where(lengths_T == 1)[0], torch.where(lengths_T > 1)[0]
    rows_TH = fvt_rows(old_DH, alignment)
    donor_SE, old_SH = donor_TE.detach()[shared_S].float(), old_DH.detach()[partner_T[shared_S]].float()
    length_S = donor_SE.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    unit_SE = donor_SE / length_S[:, None]
    for part_M in made_M.split(_BLOCK):
        wanted_ME = donor_TE.detach()[part_M].float()
        candidate_MC = (wanted_ME @ unit_SE.T).abs().topk(min(NUM_CANDIDATES, len(shared_S))).indices
        chosen_MK, weight_MK = matching_pursuit(wanted_ME, unit_SE[candidate_MC], NUM_ATOMS)
        atom_MK = candidate_MC.gather(1, chosen_MK)
        rows_TH[part_M] = ((weight_MK / length_S[atom_MK])[..., None] * old_SH[atom_MK]).sum(dim=1)
        advance(len(part_M))
    return rows_TH


def matching_pursuit(wanted_ME: Tensor, unit_MCE: Tensor, num_atoms: int) -> tuple[Tensor, Tensor]:
    """Return the atoms of each row and their weights, so that their sum is near the row; both [M, K].

    Each atom is the one most parallel to what the ones before left over; then all weights are fitted again.
    Source: orthogonal matching pursuit, Pati et al. 1993, https://doi.org/10.1109/ACSSC.1993.342465.

    Args:
        unit_MCE: the atoms to choose from, of length 1.
    """
    rest_ME = wanted_ME
    is_taken_MC = torch.zeros(unit_MCE.shape[:2], dtype=torch.bool)
    chosen_MK = torch.zeros((len(wanted_ME), 0), dtype=torch.int64)
    weight_MK = torch.zeros((len(wanted_ME), 0))
    for _ in range(min(num_atoms, unit_MCE.shape[1])):
        similar_MC = torch.bmm(unit_MCE, rest_ME[..., None])[..., 0].abs().masked_fill(is_taken_MC, -1.0)
        best_M1 = similar_MC.argmax(dim=-1, keepdim=True)
        is_taken_MC.scatter_(1, best_M1, True)
        chosen_MK = torch.cat([chosen_MK, best_M1], dim=1)
        atom_MKE = unit_MCE.gather(1, chosen_MK[..., None].expand(-1, -1, unit_MCE.shape[-1]))
        gram_MKK = torch.bmm(atom_MKE, atom_MKE.transpose(1, 2)) + _RIDGE * torch.eye(chosen_MK.shape[1])
        weight_MK = torch.linalg.solve(gram_MKK, torch.bmm(atom_MKE, wanted_ME[..., None]))[..., 0]
        rest_ME = wanted_ME - torch.bmm(weight_MK[:, None], atom_MKE)[:, 0]
    return chosen_MK, weight_MK
