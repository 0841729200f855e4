"""Tokens that an API spelled, as ids of the target's vocabulary, with the log-probabilities at each position.

Shapes: as in traces/record.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from omnidraft.errors import OmnidraftError
from omnidraft.traces.record import MAX_TOP_K, TargetLogprobs
from omnidraft.vocab.tokenizer import Vocabulary
from pipelines.lib.api_answers import ApiPosition, ApiToken

FOREIGN = "with tokens that the target's vocabulary does not have"
UNSPELLED = "with tokens whose bytes cannot be told"
NO_LOGPROBS = "without log-probabilities of all tokens"
_ESCAPED = re.compile(r"bytes:((?:[ -~]*\\x[0-9a-f]{2})+[ -~]*)")
"""OpenAI's text of a token that is not UTF-8."""
_NUMBERED = re.compile(r"id:(\d{1,8})")
"""Our own text of a token that spells nothing."""
_REPLACEMENT_CHARACTER = "\ufffd"


class AnswerRefused(OmnidraftError):
    """An answer cannot be learned from; the message says why, in the same words for all answers of that kind."""


@dataclass(frozen=True, slots=True)
class ApiTokenMapper:
    """Maps an API's tokens to a target's ids."""

    vocabulary: Vocabulary
    special_ids: Mapping[str, int]
    """The target's special tokens, which spell nothing, by their text."""

    def emitted_id(self, token: ApiToken) -> int:
        """Return the id of an emitted token. Raises AnswerRefused."""
        found = self._find(token)
        if found is None:
            raise AnswerRefused(UNSPELLED)
        return found

    def logprobs(self, positions: Sequence[ApiPosition], emitted: Sequence[int]) -> TargetLogprobs:
        """Return the log-probabilities at these positions; rows with fewer ids than the longest repeat their first one
        without any probability. Raises AnswerRefused."""
        rows = [self._row(position, token) for position, token in zip(positions, emitted, strict=True)]
        num_columns = min(max(map(len, rows)), MAX_TOP_K)
        ids_EK = np.empty((len(rows), num_columns), np.uint32)
        log_p_EK = np.full((len(rows), num_columns), -np.inf)
        for index, row in enumerate(rows):
            likeliest = sorted(row.items(), key=lambda item: -item[1])[:num_columns]
            ids_EK[index] = likeliest[0][0]
            ids_EK[index, : len(likeliest)] = [token for token, _ in likeliest]
            log_p_EK[index, : len(likeliest)] = [log_p for _, log_p in likeliest]
        with np.errstate(divide="ignore"):
            tail_E = np.log((1 - np.exp(log_p_EK).sum(axis=1)).clip(min=0.0))
        emitted_E = [row[token] for row, token in zip(rows, emitted, strict=True)]
        return TargetLogprobs(
            top_ids_EK=ids_EK,
            top_log_p_EK=log_p_EK.astype(np.float16),
            emitted_log_p_E=np.array(emitted_E, np.float16),
            tail_log_p_E=tail_E.astype(np.float16),
        )

    def _row(self, position: ApiPosition, emitted: int) -> dict[int, float]:
        """Return the log-probabilities of one position by id, the emitted one's among them."""
        if (own := _log_p(position)) is None:
            raise AnswerRefused(NO_LOGPROBS)
        row: dict[int, float] = {}
        for each in position.top_logprobs or ():
            token, log_p = self._find(each), _log_p(each)
            if token is not None and log_p is not None:  # else it is a part of the rest
                row[token] = float(np.logaddexp(row[token], log_p)) if token in row else log_p
        row[emitted] = max(row.get(emitted, own), own)
        return row

    def _find(self, token: ApiToken) -> int | None:
        """Return the id of a token, None where nothing tells which one it is.

        Raises:
            AnswerRefused: it spells what no token of the vocabulary does.
        """
        data = token_bytes(token)
        if data is None:
            return None
        found = self.vocabulary.byte_table.get(data) if data else self._numbered(token.token)
        if found is None:
            found = self.special_ids.get(token.token)
        if found is None and data:
            raise AnswerRefused(FOREIGN)
        return found

    def _numbered(self, text: str) -> int | None:
        matched = _NUMBERED.fullmatch(text)
        if matched is None or (found := int(matched[1])) >= len(self.vocabulary):
            return None
        return None if self.vocabulary.token_bytes[found] else found


def token_bytes(token: ApiToken) -> bytes | None:
    """Return the bytes that a token spells, from its text where the server tells no bytes; None: they are lost."""
    if token.bytes is not None:
        return bytes(token.bytes)
    if escaped := _ESCAPED.fullmatch(token.token):
        return escaped[1].encode("ascii").decode("unicode_escape").encode("latin-1")
    if _REPLACEMENT_CHARACTER in token.token:
        return None
    return token.token.encode("utf-8", "surrogatepass")


def _log_p(token: ApiToken) -> float | None:
    """Return a log-probability, never above 0; None for none."""
    return None if token.logprob is None or math.isnan(token.logprob) else min(token.logprob, 0.0)
