"""The settings of a request constrain its drafts: tokens that the target cannot draw are never drafted, and the
drafter's logits are changed as the target's will be.

The rule is in docs/algorithms.md section 4. Temperature and truncation are the ranking's (ranking.py). A path is the
tokens from the last emitted one, which is left out, to a node.
Shapes: D the drafter's vocabulary, T the target's, one more than its ids where the last entry is for unmapped tokens.
"""

from collections.abc import Sequence

import numpy as np

from omnidraft.decode.sampling.grammar_cursor import GrammarCursor
from omnidraft.decode.sampling.logits_pipeline import Bias, Penalties, repetition_penalised
from omnidraft.decode.sampling.thought_gate import constraint_of
from omnidraft.ports import Request
from omnidraft.vocab.alignment import Alignment

_BAN = -30.0
"""A bias that makes a token never worth a row: e^30 times less probable."""


class DraftConstraints:
    """The constraints of one text, after any node of its draft trees."""

    def __init__(self, request: Request) -> None:
        """Begin with the request's grammar at the beginning of a text, in a copy of its own."""
        self._request = request
        self._banned = frozenset(token for token, bias in request.sampling.logit_bias.items() if bias <= _BAN)
        self._output: list[int] = []
        self.reset()

    @staticmethod
    def are_needed(request: Request) -> bool:
        """Return whether the request has a grammar, a budget for thoughts, penalties or a bias."""
        sampling = request.sampling
        has_penalties = bool(sampling.logit_bias) or Penalties.are_needed(sampling)
        return has_penalties or constraint_of(sampling.grammar, request.thoughts) is not None

    def reset(self) -> None:
        """Follow the text again from its beginning, because an exception left the state unknown."""
        constraint = constraint_of(self._request.sampling.grammar, self._request.thoughts)
        self._cursor = None if constraint is None else GrammarCursor(constraint, self._request.stop_ids)
        self._shift = LogitShift(self._request)
        output, self._output = self._output, []
        self.observe(output)

    def observe(self, emitted: Sequence[int]) -> None:
        """Continue the text with emitted ids."""
        self._output += emitted
        self._forced: dict[tuple[int, ...], tuple[list[int], bool]] = {}
        self._shift.take(emitted)
        if self._cursor is not None:
            self._cursor.advance(emitted)

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Return whether the target can draw this token after the path."""
        if self._is_over(path) or token in self._banned:
            return False
        return self._cursor is None or self._cursor.allows(path, token)

    def allows_all(self, path: Sequence[int], tokens: Sequence[int]) -> bool:
        """Return whether the target can draw these text tokens, one after the other, after the path."""
        if self._is_over(path) or not self._banned.isdisjoint(tokens):
            return False
        return self._cursor is None or self._cursor.allows_all(path, tokens)

    def adjusted(self, logits_D: np.ndarray, alignment: Alignment, path: Sequence[int]) -> np.ndarray:
        """Return the drafter's logits after the path as penalties, bias and grammar leave them, each token changed like
        the target token that it begins with; -inf where that is forbidden."""
        first_D = alignment.first_D
        logits = logits_D[: len(first_D)].copy()
        self._shift.apply(logits, first_D, alignment.num_target, path)
        if self._cursor is not None:
            is_allowed_T = np.append(self._cursor.allowed(path, alignment.num_target), False)
            logits[~is_allowed_T[first_D]] = -np.inf
        return logits

    def forced(self, path: Sequence[int]) -> tuple[list[int], bool]:
        """Return what must follow the path and whether nothing else can: the one token or the stop ids; or tokens that
        spell the bytes which must follow, in one of several ways. Nothing where the grammar leaves a choice."""
        key = tuple(path)
        if self._cursor is None or self._is_over(path):
            return [], False
        if key not in self._forced:
            self._forced[key] = self._found_forced(self._cursor, path)
        return self._forced[key]

    def is_complete(self, path: Sequence[int]) -> bool:
        """Return whether only the end of the text may follow the path."""
        return self._cursor is not None and not self._is_over(path) and self._cursor.is_complete(path)

    def _found_forced(self, cursor: GrammarCursor, path: Sequence[int]) -> tuple[list[int], bool]:
        if cursor.is_complete(path):
            return sorted(self._request.stop_ids), len(self._request.stop_ids) == 1
        only = cursor.only_token(path)
        return ([only], True) if only is not None else (cursor.forced_tokens(path), False)

    def _is_over(self, path: Sequence[int]) -> bool:
        return bool(path) and path[-1] in self._request.stop_ids


class LogitShift:
    """Penalties and bias of target tokens, for the draft tokens that begin with them."""

    def __init__(self, request: Request) -> None:
        self._sampling = request.sampling
        self._penalties = Penalties(request) if Penalties.are_needed(request.sampling) else None
        self._bias = Bias(request.sampling) if request.sampling.logit_bias else None

    def take(self, emitted: Sequence[int]) -> None:
        """Continue the text with emitted ids."""
        if self._penalties is not None:
            for token in emitted:
                self._penalties.take(token)

    def apply(self, logits_D: np.ndarray, first_D: np.ndarray, num_target: int, path: Sequence[int]) -> None:
        """Change the logits after the path in place."""
        if self._penalties is None and self._bias is None:
            return
        added_T = np.zeros(num_target + 1)
        if self._penalties is not None:
            penalties = self._penalties.after(path)
            self._penalise_repetition(logits_D, first_D, penalties, num_target)
            penalties.apply(added_T)  # repetition leaves zeros as they are
        if self._bias is not None:
            self._bias.apply(added_T)
        logits_D += added_T[first_D]

    def _penalise_repetition(
        self, logits_D: np.ndarray, first_D: np.ndarray, penalties: Penalties, num_target: int
    ) -> None:
        if self._sampling.repetition_penalty != 1:
            is_repeated_T = np.zeros(num_target + 1, bool)
            is_repeated_T[penalties.repeated_ids()] = True
            is_repeated_D = is_repeated_T[first_D]
            penalised = repetition_penalised(logits_D[is_repeated_D], self._sampling.repetition_penalty)
            logits_D[is_repeated_D] = penalised
