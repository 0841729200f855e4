"""Change single logits before the draw: penalties on tokens that were said already, and the client's bias.

Which ids count, as in vLLM and transformers: repetition those of the prompt and of the answer, frequency and presence
(OpenAI's) those of the answer alone. In this order: repetition, frequency, presence; the bias after them.
Sources: https://arxiv.org/abs/1909.05858, section 4.1 (repetition);
https://developers.openai.com/api/docs/advanced-usage (frequency and presence).
Shapes: V vocabulary, S ids that were said.
"""

from collections import Counter

import numpy as np

from omnidraft.ports import Request, Sampling


class Penalties:
    """Implements processors.Processor for one text."""

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        self._prompt_ids = np.unique(np.array(request.prompt_ids, np.int64))
        self._num_said: Counter[int] = Counter()

    @staticmethod
    def are_needed(sampling: Sampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def apply(self, logits_V: np.ndarray) -> None:
        """See processors.Processor."""
        said_S = np.fromiter(self._num_said, np.int64, len(self._num_said))
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            ids = np.union1d(self._prompt_ids, said_S)
            score = logits_V[ids]
            penalty = sampling.repetition_penalty
            logits_V[ids] = np.where(score > 0, score / penalty, score * penalty)
        num_said_S = np.fromiter(self._num_said.values(), np.float64, len(self._num_said))
        logits_V[said_S] -= sampling.frequency_penalty * num_said_S
        logits_V[said_S] -= sampling.presence_penalty

    def take(self, token: int) -> None:
        """See processors.Processor."""
        self._num_said[token] += 1


class Bias:
    """Implements processors.Processor: the client's numbers, added to the logits of its ids."""

    def __init__(self, sampling: Sampling) -> None:
        self._ids = np.array(list(sampling.logit_bias), np.int64)
        self._added = np.array(list(sampling.logit_bias.values()), np.float64)

    def apply(self, logits_V: np.ndarray) -> None:
        """See processors.Processor."""
        logits_V[self._ids] += self._added

    def take(self, token: int) -> None:
        """A bias does not depend on what was said."""
