"""transformers' own greedy `generate`, as a user would call it: the yardstick that our plain decoding stands beside."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer."""

    ids: tuple[int, ...]
    first_token_s: float
    decode_s: float
    """From the first token to the last."""


class HfGenerate:
    """A model as its folder says, in bfloat16."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()

    @torch.inference_mode()
    def generate(self, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Sequence[int]) -> Generated:
        """Greedy; the first token is timed by a call for one token."""
        prompt = torch.tensor([list(prompt_ids)])
        started = time.perf_counter()
        self._generate(prompt, 1, stop_ids)
        first_s = time.perf_counter() - started
        started = time.perf_counter()
        output = self._generate(prompt, max_new_tokens, stop_ids)
        total_s = time.perf_counter() - started
        return Generated(tuple(output[0, prompt.shape[1] :].tolist()), first_s, total_s - first_s)

    def _generate(self, prompt: torch.Tensor, max_new_tokens: int, stop_ids: Sequence[int]) -> torch.Tensor:
        ids: torch.Tensor = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=min(stop_ids, default=0),
        )
        return ids
