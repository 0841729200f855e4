"""Target tokens that were drafted in the place of an emitted one, as a record's rounds tell.

Shapes: R rounds, M drafted nodes of all rounds together, N rejected tokens.
A round ends with the target's own token, which nobody drafted: the children of the last node on its path are what was
drafted instead. Nodes behind these have no p in the record. A round that ends the text on its path rejected nothing.
"""

import numpy as np

from omnidraft.traces.record import Rounds


def rejected_tokens(rounds: Rounds) -> np.ndarray:
    """int64 [N, 2]: index of the emitted token, and the target id drafted there; in the order of the text."""
    num_nodes_R = rounds.num_nodes_R.astype(np.int64)
    round_M = np.repeat(np.arange(len(num_nodes_R)), num_nodes_R)
    node_M = np.arange(len(round_M)) - (np.cumsum(num_nodes_R) - num_nodes_R)[round_M] + 1  # 0 is the root
    last_R = np.zeros(len(num_nodes_R), np.int64)
    np.maximum.at(last_R, round_M, np.where(rounds.accepted_M == 1, node_M, 0))
    num_emitted_R, num_accepted_R = rounds.num_emitted_R.astype(np.int64), rounds.num_accepted_R.astype(np.int64)
    own_R = np.cumsum(num_emitted_R) - 1
    has_own_R = num_emitted_R == num_accepted_R + 1
    is_rejected_M = has_own_R[round_M] & (rounds.parents_M == last_R[round_M]) & (rounds.accepted_M == 0)
    return np.stack([own_R[round_M], rounds.node_ids_M.astype(np.int64)], axis=1)[is_rejected_M]
