"""Logits processors: penalties on tokens of the text so far, and the client's bias.

The ids that count are those of vLLM and transformers: for repetition those of prompt and output, for frequency and
presence (OpenAI's) those of the output alone. The order is repetition, frequency, presence; the bias follows them.
Sources: https://arxiv.org/abs/1909.05858, section 4.1 (repetition);
https://developers.openai.com/api/docs/advanced-usage (frequency and presence).
Shapes: V vocabulary, S distinct output ids.
"""

from collections import Counter

import numpy as np

from omnidraft.ports import Request, Sampling


class Penalties:
    """Implements logits_pipeline.Processor for one text."""

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        self._prompt_ids = np.unique(np.array(request.prompt_ids, np.int64))
        self._num_output: Counter[int] = Counter()

    @staticmethod
    def are_needed(sampling: Sampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def apply(self, logits_V: np.ndarray) -> None:
        """See logits_pipeline.Processor."""
        output_ids_S = np.fromiter(self._num_output, np.int64, len(self._num_output))
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            ids = np.union1d(self._prompt_ids, output_ids_S)
            score = logits_V[ids]
            penalty = sampling.repetition_penalty
            logits_V[ids] = np.where(score > 0, score / penalty, score * penalty)
        counts_S = np.fromiter(self._num_output.values(), np.float64, len(self._num_output))
        logits_V[output_ids_S] -= sampling.frequency_penalty * counts_S
        logits_V[output_ids_S] -= sampling.presence_penalty

    def take(self, token: int) -> None:
        """See logits_pipeline.Processor."""
        self._num_output[token] += 1


class Bias:
    """Implements logits_pipeline.Processor: adds the client's numbers to the logits of its ids."""

    def __init__(self, sampling: Sampling) -> None:
        self._ids = np.array(list(sampling.logit_bias), np.int64)
        self._added = np.array(list(sampling.logit_bias.values()), np.float64)

    def apply(self, logits_V: np.ndarray) -> None:
        """See logits_pipeline.Processor."""
        logits_V[self._ids] += self._added

    def take(self, token: int) -> None:
        """See logits_pipeline.Processor. A bias does not depend on the output."""
