"""What the target believed where it drew: the raw log-probabilities that a trace record carries, or a client asks for.

Shapes: N nodes of the tree, V vocabulary, E emitted tokens, K log-probabilities kept, R rows, C columns of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from omnidraft.ports import LogProbs
from omnidraft.traces.record import TargetLogprobs

_HEIGHT = 64
"""Numbers of a column."""


def top_k_logprobs(logits_NV: torch.Tensor, nodes: Sequence[int], emitted: Sequence[int], top_k: int) -> TargetLogprobs:
    """Top-k, the emitted token's and the tail's log-probabilities after each node that a token was drawn from."""
    logits_EV = logits_NV[list(nodes)]  # a copy, which the weights then take
    top_EK, ids_EK = blocked_topk(logits_EV, top_k)
    emitted_E = logits_EV.gather(1, torch.tensor(emitted, device=logits_EV.device)[:, None])[:, 0]
    most_E1 = top_EK[:, :1]
    weights_EV = logits_EV.sub_(most_E1).exp_()
    log_sum_E = weights_EV.sum(-1).log()
    tail_E = weights_EV.scatter_(1, ids_EK, 0.0).sum(-1).log()
    norm_E = most_E1[:, 0] + log_sum_E
    return TargetLogprobs(
        top_ids_EK=ids_EK.cpu().numpy().astype(np.uint32),
        top_log_p_EK=(top_EK - norm_E[:, None]).cpu().numpy().astype(np.float16),
        emitted_log_p_E=(emitted_E - norm_E).cpu().numpy().astype(np.float16),
        tail_log_p_E=(tail_E - log_sum_E).cpu().numpy().astype(np.float16),
    )


def client_logprobs(logits_NV: torch.Tensor, nodes: Sequence[int], emitted: Sequence[int], num: int) -> LogProbs:
    """The emitted tokens' log-probabilities and those of the `num` likeliest, in float32, for who asks."""
    logits_EV = logits_NV[list(nodes)].float()
    norm_E1 = logits_EV.logsumexp(-1, keepdim=True)
    emitted_E1 = logits_EV.gather(1, torch.tensor(emitted, device=logits_EV.device)[:, None]) - norm_E1
    if num == 0:
        return LogProbs(tuple(emitted_E1[:, 0].tolist()), ((),) * len(emitted))
    top_EK, ids_EK = blocked_topk(logits_EV, num)
    rows = zip(ids_EK.tolist(), (top_EK - norm_E1).tolist(), strict=True)
    return LogProbs(tuple(emitted_E1[:, 0].tolist()), tuple(tuple(zip(ids, log_p, strict=True)) for ids, log_p in rows))


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
