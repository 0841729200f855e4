"""The largest of many numbers, several times as fast as torch.topk over a whole vocabulary.

Shapes: R rows, V numbers each, K wanted, C columns.
"""

import torch

_HEIGHT = 64
"""Numbers of a column."""


def blocked_topk(values_RV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` largest of each row and where they stand, both [R, K], largest first; as torch.topk.

    Where the largest stand, the columns with the largest tops stand too: as many columns as numbers are wanted hold
    them all.
    """
    rows, size = values_RV.shape
    num, columns = min(num, size), size // _HEIGHT
    if num * 4 > columns:
        found = torch.topk(values_RV, num)
        return found.values, found.indices
    whole = columns * _HEIGHT
    values_RHC = values_RV[:, :whole].reshape(rows, _HEIGHT, columns)
    columns_RK = torch.topk(values_RHC.amax(1), num).indices
    ids_RN = (torch.arange(_HEIGHT, device=values_RV.device)[:, None] * columns + columns_RK[:, None]).flatten(1)
    rest = torch.arange(whole, size, device=values_RV.device).expand(rows, -1)
    ids_RN = torch.cat([ids_RN, rest], dim=1)
    found = torch.topk(values_RV.gather(1, ids_RN), num)
    return found.values, ids_RN.gather(1, found.indices)
