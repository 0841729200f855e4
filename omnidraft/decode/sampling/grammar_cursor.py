"""A grammar's state after any node of a draft tree, in a copy of its own: nothing that is only drafted reaches the
matcher of the target's draws.

The copy moves along the tree by taking tokens and taking them back, a few microseconds each. A path is the tokens from
the last emitted one, which is left out, to a node.
Shapes: V vocabulary.
"""

from collections.abc import Sequence

import numpy as np

from omnidraft.decode.common_prefix import common_prefix
from omnidraft.decode.sampling.grammar import Matcher
from omnidraft.decode.sampling.thought_gate import Constraint


class GrammarCursor:
    """Follows one text and the paths that are drafted after it."""

    def __init__(self, grammar: Constraint, stop_ids: frozenset[int]) -> None:
        """Begin with a copy of the grammar, at the beginning of its text."""
        self._grammar = grammar.copy()
        self._matcher = Matcher(self._grammar, stop_ids)
        self._stop_ids = stop_ids
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], np.ndarray] = {}

    def advance(self, emitted: Sequence[int]) -> None:
        """Continue the text with emitted ids; all paths begin after them."""
        self._move(())
        for token in emitted:
            self._matcher.take(token)
        self._masks = {}

    def allows(self, path: Sequence[int], token: int) -> bool:
        """Return whether this token may follow the path."""
        self._move(path)
        return self._grammar.is_accepting() if token in self._stop_ids else self._grammar.allows(token)

    def allows_all(self, path: Sequence[int], tokens: Sequence[int]) -> bool:
        """Return whether these tokens, no stop ids, may follow the path one after the other."""
        self._move(path)
        return self._grammar.allows(*tokens)

    def allowed(self, path: Sequence[int], vocab_size: int) -> np.ndarray:
        """Return which tokens may follow the path, bool [V]; not to be changed. Raises RequestError."""
        key = tuple(path)
        if key not in self._masks:
            self._move(path)
            self._masks[key] = self._matcher.allowed(vocab_size)
        return self._masks[key]

    def is_complete(self, path: Sequence[int]) -> bool:
        """Return whether only the end of the text may follow the path."""
        self._move(path)
        return self._grammar.is_complete()

    def forced_tokens(self, path: Sequence[int]) -> list[int]:
        """Return tokens that spell the bytes which must follow the path; see CompiledGrammar.forced_tokens."""
        self._move(path)
        return self._grammar.forced_tokens() if self._grammar.forces_bytes() else []

    def only_token(self, path: Sequence[int]) -> int | None:
        """Return the token after the path where no other one may follow."""
        self._move(path)
        if not self._grammar.forces_bytes() or self._grammar.is_accepting():
            return None
        return self._grammar.only_token()

    def _move(self, path: Sequence[int]) -> None:
        """Take the grammar from its present path to this one."""
        num_shared = common_prefix(self._path, path)
        if num_shared < len(self._path):
            self._grammar.take_back(len(self._path) - num_shared)
        for token in path[num_shared:]:
            self._grammar.take(token)
        self._path = list(path)
