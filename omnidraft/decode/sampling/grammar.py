"""Constrains a text to a JSON schema or a regular expression, byte by byte, in the target's own vocabulary.

A grammar is checked against bounds, tried in a child process, compiled here, and cached for its client and scope.
Masks say which tokens may come next; no spelling is ever forced: every token whose bytes fit is left to the target's
draw. The engine ends texts itself, so that any stop ids work.
Shapes: V vocabulary.
"""

from dataclasses import replace
from functools import cached_property, lru_cache

import numpy as np

from omnidraft.decode.sampling.grammar_compiler import CompiledGrammar, GrammarCompiler
from omnidraft.decode.sampling.grammar_trial import GrammarTrial, TrialUnfinished
from omnidraft.decode.sampling.thought_gate import Constraint, constraint_of
from omnidraft.errors import RequestError
from omnidraft.ports import Grammar, Sampling
from omnidraft.vocab.thoughts import Thoughts
from omnidraft.vocab.tokenizer import Vocabulary

MAX_CLIENTS, GRAMMARS_PER_CLIENT = 32, 8
"""Clients with cached grammars, and compiled and refused grammars of each. A client drops its own grammars only, and
what others compiled shows in nobody's waiting time."""


class Grammars:
    """Compiles grammars for one vocabulary, and caches the last ones. For any thread."""

    def __init__(self, vocabulary: Vocabulary, trial: GrammarTrial | None = None) -> None:
        """Compile for this vocabulary, which is read on first use.

        Args:
            trial: tries each grammar first; None trusts them.
        """
        self._vocabulary = vocabulary
        self._trial = trial
        self._outcomes_of = lru_cache(MAX_CLIENTS)(lambda client: lru_cache(GRAMMARS_PER_CLIENT)(self._compile))

    def prepare(self) -> None:
        """Read the vocabulary now: half a second in which no other thread runs, for 150,000 tokens."""
        _ = self._compiler

    def compile(self, grammar: Grammar, *, client: str = "", cache_scope: str | None = None) -> Grammar:
        """Return the grammar compiled, in the caller's thread.

        Args:
            client: the cache in which it is looked for.
            cache_scope: a grammar compiled in another scope is compiled again.

        Raises:
            RequestError: it cannot be compiled.
        """
        if grammar.compiled is not None:
            return grammar
        outcome = self._outcomes_of(client)(replace(grammar), cache_scope)
        if isinstance(outcome, str):
            raise RequestError(outcome)
        return replace(grammar, compiled=outcome)

    def prepared(self, sampling: Sampling, *, client: str = "", cache_scope: str | None = None) -> Sampling:
        """Return the settings with their grammar compiled, so that drafting follows it too. Raises RequestError."""
        if sampling.grammar is None:
            return sampling
        return replace(sampling, grammar=self.compile(sampling.grammar, client=client, cache_scope=cache_scope))

    def matcher(self, grammar: Grammar, stop_ids: frozenset[int], thoughts: Thoughts | None = None) -> "Matcher":
        """Return a matcher at the beginning of a text; compiles the grammar where that was not done.

        Raises:
            RequestError: the grammar cannot be compiled, or the target has no stop id that could end its texts.
        """
        require_end(stop_ids)
        constraint = constraint_of(self.compile(grammar), thoughts)
        assert constraint is not None
        return Matcher(constraint, stop_ids)

    def _compile(self, grammar: Grammar, _cache_scope: str | None) -> CompiledGrammar | str:
        """Return the grammar, or the reason for its refusal. Raises TrialUnfinished, which is not cached."""
        try:
            if self._trial is not None:
                self._trial.check(grammar.kind, grammar.text)
            return self._compiler.compile(grammar.kind, grammar.text)
        except TrialUnfinished:
            raise
        except RequestError as exc:
            return str(exc)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._vocabulary)


def require_end(stop_ids: frozenset[int]) -> None:
    """Raises RequestError where no id could end a text that is kept to a grammar."""
    if not stop_ids:
        raise RequestError(
            "a grammar needs an end-of-text token: this target has none, or the request ignores it (ignore_eos)"
        )


class Matcher:
    """Implements logits_pipeline.Processor: -inf for every token that the grammar does not allow next."""

    def __init__(self, grammar: Constraint, stop_ids: frozenset[int]) -> None:
        self._grammar = grammar
        self._stop_ids = np.array(sorted(stop_ids))

    def allowed(self, vocab_size: int) -> np.ndarray:
        """Return which tokens may come next, bool [V].

        Raises:
            RequestError: the grammar became too complex to follow.
        """
        is_allowed_V = self._grammar.mask(vocab_size)
        is_allowed_V[self._stop_ids] = self._grammar.is_accepting()
        return is_allowed_V

    def apply(self, logits_V: np.ndarray) -> None:
        """See logits_pipeline.Processor. Stop ids are allowed where the text matches the whole grammar, and only there.

        Raises:
            RequestError: no token is left, or the grammar became too complex to follow.
        """
        logits_V[~self.allowed(len(logits_V))] = -np.inf
        if logits_V.max() == -np.inf:
            kind = self._grammar.kind
            raise RequestError(f"{kind}: no token of the target's vocabulary can follow; change the grammar")

    def take(self, token: int) -> None:
        """See logits_pipeline.Processor."""
        if token not in self._stop_ids:
            self._grammar.take(token)
