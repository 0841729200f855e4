"""Waiting for an accelerator before a clock is read: its kernels are only queued when a call returns."""

from collections.abc import Iterable

import torch


def wait_for(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until these are computed; those of a processor are."""
    for device in {each.device for each in tensors if each.device.type == "cuda"}:
        torch.cuda.synchronize(device)
