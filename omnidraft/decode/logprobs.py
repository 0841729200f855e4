"""Raw log-probabilities of the target at the emitted tokens, for trace records and for clients.

Shapes: N nodes of the tree, V vocabulary, E emitted tokens, K log-probabilities kept, R rows, C columns of a row.
"""

from collections.abc import Sequence

import numpy as np
import torch

from omnidraft.ports import LogProbs
from omnidraft.traces.record import TargetLogprobs

_HEIGHT = 64
"""Numbers in a column."""


def top_k_logprobs(logits_NV: torch.Tensor, nodes: Sequence[int], emitted: Sequence[int], top_k: int) -> TargetLogprobs:
    """Return the top-k, the emitted token's and the tail's log-probabilities after each node that a token was drawn
    from."""
    logits_EV = logits_NV[list(nodes)]  # a copy, which the weights then take
    top_EK, ids_EK = blocked_topk(logits_EV, top_k)
    emitted_E = logits_EV.gather(1, torch.tensor(emitted, device=logits_EV.device)[:, None])[:, 0]
    max_E1 = top_EK[:, :1]
    weights_EV = logits_EV.sub_(max_E1).exp_()
    log_sum_E = weights_EV.sum(-1).log()
    tail_E = weights_EV.scatter_(1, ids_EK, 0.0).sum(-1).log()
    norm_E = max_E1[:, 0] + log_sum_E
    return TargetLogprobs(
        top_ids_EK=ids_EK.cpu().numpy().astype(np.uint32),
        top_log_p_EK=(top_EK - norm_E[:, None]).cpu().numpy().astype(np.float16),
        emitted_log_p_E=(emitted_E - norm_E).cpu().numpy().astype(np.float16),
        tail_log_p_E=(tail_E - log_sum_E).cpu().numpy().astype(np.float16),
    )


def client_logprobs(logits_NV: torch.Tensor, nodes: Sequence[int], emitted: Sequence[int], num: int) -> LogProbs:
    """Return the log-probabilities of the emitted tokens and of the `num` most probable ones, in float32."""
    logits_EV = logits_NV[list(nodes)].float()
    norm_E1 = logits_EV.logsumexp(-1, keepdim=True)
    emitted_E1 = logits_EV.gather(1, torch.tensor(emitted, device=logits_EV.device)[:, None]) - norm_E1
    if num == 0:
        return LogProbs(tuple(emitted_E1[:, 0].tolist()), ((),) * len(emitted))
    top_EK, ids_EK = blocked_topk(logits_EV, num)
    rows = zip(ids_EK.tolist(), (top_EK - norm_E1).tolist(), strict=True)
    return LogProbs(tuple(emitted_E1[:, 0].tolist()), tuple(tuple(zip(ids, log_p, strict=True)) for ids, log_p in rows))


def blocked_topk(values_RV: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `num` largest numbers of each row and their indices, both [R, K], largest first, like torch.topk.

    Several times as fast over a whole vocabulary: the `num` columns with the largest maxima hold the `num` largest
    numbers.
    """
    rows, size = values_RV.shape
    num, columns = min(num, size), size // _HEIGHT
    if num * 4 > columns:
        top = torch.topk(values_RV, num)
        return top.values, top.indices
    whole = columns * _HEIGHT
    values_RHC = values_RV[:, :whole].reshape(rows, _HEIGHT, columns)
    columns_RK = torch.topk(values_RHC.amax(1), num).indices
    ids_RN = (torch.arange(_HEIGHT, device=values_RV.device)[:, None] * columns + columns_RK[:, None]).flatten(1)
    rest = torch.arange(whole, size, device=values_RV.device).expand(rows, -1)
    ids_RN = torch.cat([ids_RN, rest], dim=1)
    top = torch.topk(values_RV.gather(1, ids_RN), num)
    return top.values, ids_RN.gather(1, top.indices)
