"""What the target believed where it drew: the raw log-probabilities that a trace record carries.

Shapes: N nodes of the tree, V vocabulary, E emitted tokens, K log-probabilities kept.
"""

from collections.abc import Sequence

import numpy as np
import torch

from omnidraft.traces.record import Beliefs


def believed(logits_NV: torch.Tensor, nodes: Sequence[int], emitted: Sequence[int], top_k: int) -> Beliefs:
    """Top-k, the emitted token's and the tail's log-probabilities after each node that a token was drawn from."""
    logits_EV = logits_NV[list(nodes)]
    norm_E1 = torch.logsumexp(logits_EV, dim=-1, keepdim=True)
    top_EK, ids_EK = torch.topk(logits_EV, min(top_k, logits_EV.shape[-1]), dim=-1)
    emitted_E1 = logits_EV.gather(1, torch.tensor(emitted, device=logits_EV.device)[:, None])
    tail_EV = logits_EV.scatter(1, ids_EK, -torch.inf)
    return Beliefs(
        top_ids_EK=ids_EK.cpu().numpy().astype(np.uint32),
        top_log_p_EK=(top_EK - norm_E1).cpu().numpy().astype(np.float16),
        emitted_log_p_E=(emitted_E1 - norm_E1)[:, 0].cpu().numpy().astype(np.float16),
        tail_log_p_E=(torch.logsumexp(tail_EV, dim=-1) - norm_E1[:, 0]).cpu().numpy().astype(np.float16),
    )
