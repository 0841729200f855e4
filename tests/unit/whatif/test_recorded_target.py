"""A recorded target draws what the log has, whatever the process does beside it."""

import torch

from omnidraft.ports import DraftTree
from omnidraft.whatif.recorded_target import RecordedTarget


def test_logits_are_float32_while_another_thread_loads_a_model_in_bfloat16() -> None:
    target = RecordedTarget(40)
    target.expect((2,), (3, 4))
    torch.set_default_dtype(torch.bfloat16)
    try:
        (logits_NV,) = target.forward([(target.open((2,), 2, "fast"), DraftTree.empty(2))])
    finally:
        torch.set_default_dtype(torch.float32)
    assert logits_NV.dtype == torch.float32
    assert logits_NV.argmax() == 3
