"""transformers' assisted generation across tokenizers: what people have today, for the benchmark to compare with.

`uad` (universal assisted decoding) translates drafts as text and takes those that the target would have taken
greedily; transformers chooses it by `do_sample=False`. `tli` (token-level intersection, arXiv 2502.05202) drafts from
the tokens that both vocabularies have and accepts by rejection sampling; it is chosen by `do_sample=True`, so at
temperature 0 it samples from the single likeliest token, which is greedy decoding.
Both run with transformers' own defaults, 20 drafted tokens a pass at most.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from transformers import AutoTokenizer

from omnidraft.errors import RequestError
from omnidraft.models.hf.generate import Generated, HfGenerate, load_bfloat16


class HfAssisted:
    """A target and an assistant of its own: token-level intersection rewrites the assistant's embeddings."""

    def __init__(
        self, target: HfGenerate, target_folder: Path, drafter_folder: Path, kind: Literal["uad", "tli"]
    ) -> None:
        self._target = target
        self._kind = kind
        self._options: dict[str, Any] = {
            "assistant_model": load_bfloat16(drafter_folder),
            "tokenizer": AutoTokenizer.from_pretrained(target_folder, local_files_only=True),
            "assistant_tokenizer": AutoTokenizer.from_pretrained(drafter_folder, local_files_only=True),
        }

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, *, stop_ids: Sequence[int], temperature: float
    ) -> Generated:
        """As HfGenerate's.

        Raises:
            RequestError: uad at a temperature above 0, which transformers does not have.
        """
        if self._kind == "uad" and temperature > 0:
            raise RequestError("transformers has uad for greedy decoding only; ask for temperature 0")
        options = dict(self._options)
        if self._kind == "tli" and temperature == 0:
            options |= {"do_sample": True, "top_k": 1, "top_p": 1.0}
        return self._target.generate(
            prompt_ids, max_new_tokens, stop_ids=stop_ids, temperature=temperature, options=options
        )
