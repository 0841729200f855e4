"""transformers' own `generate`, plain and assisted: the baselines that the benchmark compares with.

`uad` (universal assisted decoding) translates drafts as text and takes those that the target would have taken
greedily; transformers chooses it by `do_sample=False`. `tli` (token-level intersection, arXiv 2502.05202) drafts from
the tokens that both vocabularies have and accepts by rejection sampling; it is chosen by `do_sample=True`, so at
temperature 0 it samples from the single likeliest token, which is greedy decoding.
Both run with transformers' own defaults, 20 drafted tokens a pass at most.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from omnidraft.errors import RequestError
from omnidraft.models.hf.pretrained import causal_lm
from omnidraft.models.hf.tokenizer_cache import fast_tokenizer
from omnidraft.models.probe import choice


@dataclass(frozen=True, slots=True)
class Generated:
    """One answer and its timing."""

    ids: tuple[int, ...]
    num_passes: int
    num_later_tokens: int
    """Tokens of the passes after the first, which took `decode_s`."""
    first_token_s: float
    decode_s: float
    """Seconds from the tokens of the first pass to those of the last."""


class HfGenerate:
    """A model of a folder in bfloat16, on the accelerator if there is one."""

    def __init__(self, folder: Path) -> None:
        self._model = load_bfloat16(folder)

    @torch.inference_mode()
    def generate(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int,
        *,
        stop_ids: Sequence[int],
        temperature: float,
        options: Mapping[str, Any] | None = None,
    ) -> Generated:
        """Generate greedily at temperature 0, else sample from the model's own distribution with a fixed seed.

        Args:
            options: more arguments of transformers' `generate`, which take precedence.
        """
        prompt = torch.tensor([list(prompt_ids)], device=self._model.device)
        arguments: dict[str, Any] = {
            "attention_mask": torch.ones_like(prompt),
            "max_new_tokens": max_new_tokens,
            "eos_token_id": list(stop_ids),
            "pad_token_id": min(stop_ids, default=0),
            **sampling_arguments(temperature),
            **(options or {}),
        }
        torch.manual_seed(0)
        clock = _PassClock()
        output = self._model.generate(prompt, streamer=clock, **arguments)  # type: ignore[operator]
        return clock.generated(output[0, prompt.shape[1] :].tolist())


class HfAssisted:
    """A target with its own assistant: token-level intersection rewrites the assistant's embeddings."""

    def __init__(
        self, target: HfGenerate, target_folder: Path, drafter_folder: Path, kind: Literal["uad", "tli"]
    ) -> None:
        self._target = target
        self._kind = kind
        self._options: dict[str, Any] = {
            "assistant_model": load_bfloat16(drafter_folder),
            "tokenizer": fast_tokenizer(target_folder),
            "assistant_tokenizer": fast_tokenizer(drafter_folder),
        }

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, stop_ids: Sequence[int], temperature: float
    ) -> Generated:
        """Generate an answer as HfGenerate does, with assistance.

        Raises:
            RequestError: uad at a temperature above 0, which transformers does not support.
        """
        if self._kind == "uad" and temperature > 0:
            raise RequestError("transformers has uad for greedy decoding only; ask for temperature 0")
        options = dict(self._options)
        if self._kind == "tli" and temperature == 0:
            options |= {"do_sample": True, "top_k": 1, "top_p": 1.0}
        return self._target.generate(
            prompt_ids, max_new_tokens, stop_ids=stop_ids, temperature=temperature, options=options
        )


def sampling_arguments(temperature: float) -> dict[str, Any]:
    """Return arguments for sampling from the model's distribution at this temperature, without default filters."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def load_bfloat16(folder: Path) -> PreTrainedModel:
    """Load the model of a folder, without the sampling defaults that the folder may set.

    Raises:
        ModelError: torch multiplies no matrices of bfloat16 here.
    """
    if not torch.cuda.is_available():
        choice.torch_products().require("bfloat16")
    transformers_logging.disable_progress_bar()
    model = causal_lm(folder, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig()
    if torch.cuda.is_available():
        model.to("cuda")  # type: ignore[arg-type]
    return model.eval()


class _PassClock(BaseStreamer):
    """A streamer that records the time of each pass of the target: `generate` calls it once a pass."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._nums: list[int] = []
        self._times_s: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record a pass; the first call is the prompt, which counts as no pass."""
        self._nums.append(value.numel())
        self._times_s.append(time.perf_counter() - self._started)

    def end(self) -> None:
        """Do nothing, as no tokens are buffered."""

    def generated(self, ids: Sequence[int]) -> Generated:
        """Return the answer with the recorded passes and times."""
        nums, times_s = self._nums[1:], self._times_s[1:]
        return Generated(tuple(ids), len(nums), sum(nums[1:]), times_s[0], times_s[-1] - times_s[0])
