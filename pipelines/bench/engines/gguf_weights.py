"""The weights of a GGUF file that a pass reads."""

from pathlib import Path

from gguf import GGUFReader

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def matrix_sizes(gguf: Path) -> tuple[int, int]:
    """Return the number of weights and the bytes of the file's matrices, the embedding only as the head."""
    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors if len(tensor.shape) == 2}
    if _HEAD in tensors:
        tensors.pop(_EMBEDDING, None)
    return sum(int(each.n_elements) for each in tensors.values()), sum(int(each.n_bytes) for each in tensors.values())
