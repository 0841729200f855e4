"""A linear layer whose weights are packed for kernels.cpp: bfloat16, or 256 or 16 levels a group of 32 inputs.

What a row gives depends neither on the other rows of the pass nor on the number of threads.
Shapes: R rows, K inputs, N outputs.
"""

import ctypes

import torch
from torch import nn

from omnidraft.models.native import library as native
from omnidraft.models.native.weights import memory, pack


class PackedLinear(nn.Module):
    """Stands in for an nn.Linear, float32 in and out."""

    def __init__(self, linear: nn.Linear, kind: str, library: ctypes.CDLL) -> None:
        super().__init__()
        self._library = library
        self._kind = native.KINDS[kind]
        self.out_features, self.in_features = linear.weight.shape
        self._bias = None if linear.bias is None else linear.bias.detach().float()
        self._memory = memory(library.omnidraft_packed_bytes(self._kind, *linear.weight.shape))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        pack(library, self._kind, linear.weight, self._address)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x_RK = x.reshape(-1, self.in_features)
        rows = len(x_RK)
        if self.in_features % native.GROUP:
            x_RK = nn.functional.pad(x_RK, (0, -self.in_features % native.GROUP))
        x_RK = x_RK.contiguous()
        row_bytes = self._library.omnidraft_row_bytes(self._kind, self.in_features)
        scratch = torch.empty(rows * row_bytes, dtype=torch.uint8)
        y_RN = torch.empty(rows, -(-self.out_features // native.BLOCK) * native.BLOCK, dtype=torch.float32)
        if rows:
            sizes = (rows, self.out_features, self.in_features)
            buffers = (scratch.data_ptr(), y_RN.data_ptr())
            threads = torch.get_num_threads()
            self._library.omnidraft_linear(self._kind, self._address, x_RK.data_ptr(), *sizes, *buffers, threads)
        y_RN = y_RN[:, : self.out_features]
        return (y_RN if self._bias is None else y_RN + self._bias).reshape(*x.shape[:-1], self.out_features)
