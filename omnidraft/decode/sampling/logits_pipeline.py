"""Turns the target's raw logits into the distribution that the request's sampling settings ask for.

In this order: penalties (repetition, frequency, presence), bias, grammar, temperature, top-k, top-p, min-p; for the
nodes that the target's draws visit and no others. Only ids that can be drawn are returned. Sorts are stable:
probability down, id up.
The ids that count for penalties are those of vLLM and transformers: for repetition those of prompt and output, for
frequency and presence (OpenAI's) those of the output alone.
Sources: https://arxiv.org/abs/1909.05858, section 4.1 (repetition);
https://developers.openai.com/api/docs/advanced-usage (frequency and presence).
Shapes: V vocabulary, M ids left, S distinct output ids.
"""

import copy
import math
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from omnidraft.errors import ContractError, RequestError
from omnidraft.ports import Request, Sampling

_NUCLEUS_START = 1024


class Processor(Protocol):
    """Changes the logits of one text before temperature; holds that text's history."""

    def apply(self, logits_V: np.ndarray) -> None:
        """Change float64 logits in place, for the draw after all tokens taken.

        Raises:
            RequestError: no token is left.
        """

    def take(self, token: int) -> None:
        """Add the token that the target drew."""
        return


class LogitsPipeline:
    """The distributions of one text. It follows the draws in order, so that the history of each is the prompt, all that
    was emitted before, and its own node's path: nothing that was only drafted."""

    def __init__(self, request: Request, grammar: Processor | None = None) -> None:
        self._sampling = request.sampling
        processors: list[Processor] = []
        if Penalties.are_needed(request.sampling):
            processors.append(Penalties(request))
        if request.sampling.logit_bias:
            processors.append(Bias(request.sampling))
        if Limits.are_needed(request):
            processors.append(Limits(request))
        if grammar is not None:
            processors.append(grammar)
        self._processors = tuple(processors)

    def distribution(self, logits_V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and probabilities of the next draw; see sampling_distribution.

        Raises:
            RequestError: no token is left.
            ContractError: see sampling_distribution; processors hide nothing of the target's logits.
        """
        if self._processors:
            _require_finite(logits_V.max())
            logits_V = logits_V.astype(np.float64)
        for processor in self._processors:
            processor.apply(logits_V)
        return sampling_distribution(logits_V, self._sampling)

    def take(self, token: int) -> None:
        """Add the token that the target drew from the last distribution."""
        for processor in self._processors:
            processor.take(token)


def sampling_distribution(logits_V: np.ndarray, sampling: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and float64 probabilities, summing to 1, none of them 0. Temperature 0 returns the most probable id
    alone.

    Raises:
        ContractError: the largest logit is not finite: one of them is NaN or +inf, or all are -inf.
    """
    if sampling.temperature == 0:
        best = logits_V.argmax()  # the first NaN, where there is one
        _require_finite(logits_V[best])
        return np.array([best]), np.ones(1)
    x_V = torch.from_numpy(logits_V).double()
    max_logit = x_V.max()  # NaN, where there is one
    _require_finite(max_logit.item())
    x_V -= max_logit  # before the temperature, which may be tiny
    p_V = torch.softmax(x_V.div_(sampling.temperature), 0).numpy()
    ids = np.arange(len(p_V)) if p_V.all() else np.flatnonzero(p_V)
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return ids, p_V[ids] if len(ids) < len(p_V) else p_V
    if sampling.top_k is not None:
        ids = _most_probable(p_V, sampling.top_k)
    if sampling.top_p is not None and sampling.top_p < 1:
        ids = _nucleus(p_V, ids, sampling.top_p)
    if sampling.min_p is not None:
        ids = ids[p_V[ids] >= sampling.min_p * p_V.max()]
    p_M = p_V[ids]
    return ids, p_M / p_M.sum()


def _require_finite(max_logit: float) -> None:
    if not math.isfinite(max_logit):
        raise ContractError(
            f"the target's largest logit is {max_logit}: its weights or its computation are broken; see "
            "`omnidraft check`"
        )


def _most_probable(p_V: np.ndarray, num_ids: int) -> np.ndarray:
    """Return the first `num_ids` ids of the stable order, in that order, without sorting the vocabulary; none of them
    0."""
    threshold = np.partition(p_V, len(p_V) - num_ids)[len(p_V) - num_ids] if num_ids < len(p_V) else 0.0
    ids = np.flatnonzero(p_V >= threshold) if threshold else np.flatnonzero(p_V)
    return ids[np.argsort(-p_V[ids], kind="stable")][:num_ids]


def _nucleus(p_V: np.ndarray, ids: np.ndarray, top_p: float) -> np.ndarray:
    """Return the shortest prefix of the stable order that holds `top_p` of the mass of `ids`."""
    total = p_V[ids].sum()
    ids = np.sort(ids)
    p_M = p_V[ids] / total
    for num_ids in (_NUCLEUS_START, len(ids)):
        prefix = _most_probable(p_M, num_ids)
        mass = np.cumsum(p_M[prefix])
        if mass[-1] >= top_p or num_ids >= len(ids):
            break
    return ids[prefix[: int(np.searchsorted(mass, top_p)) + 1]]


class Penalties:
    """Implements Processor: penalties on the tokens of one text so far."""

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        self._prompt_ids = np.unique(np.array(request.prompt_ids, np.int64))
        self._num_output: Counter[int] = Counter()

    @staticmethod
    def are_needed(sampling: Sampling) -> bool:
        return sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0

    def apply(self, logits_V: np.ndarray) -> None:
        """See Processor."""
        output_ids_S = np.fromiter(self._num_output, np.int64, len(self._num_output))
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            ids = self.repeated_ids()
            logits_V[ids] = repetition_penalised(logits_V[ids], sampling.repetition_penalty)
        counts_S = np.fromiter(self._num_output.values(), np.float64, len(self._num_output))
        logits_V[output_ids_S] -= sampling.frequency_penalty * counts_S
        logits_V[output_ids_S] -= sampling.presence_penalty

    def take(self, token: int) -> None:
        """See Processor."""
        self._num_output[token] += 1

    def repeated_ids(self) -> np.ndarray:
        """Return the ids that the repetition penalty is for: those of prompt and output."""
        return np.union1d(self._prompt_ids, np.fromiter(self._num_output, np.int64, len(self._num_output)))

    def after(self, path: Sequence[int]) -> "Penalties":
        """Return the penalties after these further tokens, which are not taken here."""
        later = copy.copy(self)
        later._num_output = self._num_output + Counter(path)
        return later


def repetition_penalised(logits: np.ndarray, penalty: float) -> np.ndarray:
    """Return the logits of repeated tokens."""
    penalised: np.ndarray = np.where(logits > 0, logits / penalty, logits * penalty)
    return penalised


class Bias(Processor):
    """Implements Processor: adds the client's numbers to the logits of its ids."""

    def __init__(self, sampling: Sampling) -> None:
        self._ids = np.array(list(sampling.logit_bias), np.int64)
        self._added = np.array(list(sampling.logit_bias.values()), np.float64)

    def apply(self, logits_V: np.ndarray) -> None:
        """See Processor."""
        logits_V[self._ids] += self._added


class Limits:
    """Implements Processor: ids that a client allows, forbids, or forbids for a while."""

    def __init__(self, request: Request) -> None:
        allowed = request.sampling.allowed_ids
        self._allowed = None if allowed is None else np.array(sorted(allowed), np.int64)
        self._ends = np.array(sorted(request.stop_ids), np.int64)
        self._num_before_end = request.min_new_tokens
        self._bad = request.bad_ids
        self._ids: list[int] = []

    @staticmethod
    def are_needed(request: Request) -> bool:
        return bool(request.min_new_tokens or request.bad_ids or request.sampling.allowed_ids is not None)

    def apply(self, logits_V: np.ndarray) -> None:
        """See Processor."""
        if self._allowed is not None:
            kept = logits_V[self._allowed]
            logits_V[:] = -np.inf
            logits_V[self._allowed] = kept
        if len(self._ids) < self._num_before_end:
            logits_V[self._ends] = -np.inf
        for *before, last in self._bad:
            if self._ids[len(self._ids) - len(before) :] == before:
                logits_V[last] = -np.inf
        if not np.isfinite(logits_V.max()):
            raise RequestError("no token is left that the request allows")

    def take(self, token: int) -> None:
        """See Processor."""
        self._ids.append(token)
