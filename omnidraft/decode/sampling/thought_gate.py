"""A grammar that begins behind the thoughts of an answer, and a budget for these.

While thoughts are said every token may come next; when the budget is used up, those alone that close them. Before the
content white space may stand, or thoughts may begin.
"""

import numpy as np

from omnidraft.decode.sampling.grammar_compiler import CompiledGrammar
from omnidraft.ports import Grammar
from omnidraft.vocab.thoughts import MAX_BLANK, Phase, Thoughts


class ThoughtGate:
    """Follows one text as CompiledGrammar does. The content's grammar has taken the tokens from the state's `begin` on,
    as far as it allows them."""

    def __init__(self, thoughts: Thoughts, grammar: CompiledGrammar | None) -> None:
        """Begin with the grammar at the beginning of its text, which belongs to the gate; None leaves content free."""
        self._thoughts, self._grammar = thoughts, grammar
        self._states = [thoughts.start]
        self._tokens: list[int] = []
        self._num_taken = 0

    @property
    def kind(self) -> str:
        return "thinking" if self._grammar is None else self._grammar.kind

    def copy(self) -> "ThoughtGate":
        """Return another one in the same state."""
        made = ThoughtGate(self._thoughts, self._grammar and self._grammar.copy())
        made._states, made._tokens, made._num_taken = [*self._states], [*self._tokens], self._num_taken
        return made

    def take(self, token: int) -> None:
        """Continue the text with this token."""
        before = self._states[-1]
        self._states.append(self._thoughts.after(before, token, len(self._tokens)))
        self._tokens.append(token)
        self._follow(before.begin)

    def take_back(self, num_tokens: int) -> None:
        """Remove the last tokens from the text."""
        before = self._states[-1]
        del self._states[len(self._states) - num_tokens :], self._tokens[len(self._tokens) - num_tokens :]
        self._follow(before.begin)

    def _follow(self, begin: int | None) -> None:
        """Bring the grammar, which has taken tokens from `begin` on, to those that are its text now."""
        if self._grammar is None:
            return
        new = self._states[-1].begin
        num_wanted = 0 if new is None else len(self._tokens) - new
        num_kept = min(self._num_taken, num_wanted) if begin == new else 0
        if num_kept < self._num_taken:
            self._grammar.take_back(self._num_taken - num_kept)
        self._num_taken = num_kept
        for token in self._tokens[len(self._tokens) - num_wanted + num_kept :] if num_wanted else ():
            if self._states[-1].phase is Phase.LEAD and not self._grammar.allows(token):
                break
            self._grammar.take(token)
            self._num_taken += 1

    @property
    def _content(self) -> CompiledGrammar | None:
        """The grammar, where the text so far may be content."""
        begin = self._states[-1].begin
        return self._grammar if begin is None or self._num_taken == len(self._tokens) - begin else None

    def is_accepting(self) -> bool:
        """Return whether the text so far may be the whole answer."""
        if self._thoughts.is_spent(self._states[-1]):
            return False
        return self._grammar is None or (self._content is not None and self._content.is_accepting())

    def is_complete(self) -> bool:
        """Return whether it is the whole answer and nothing can follow it."""
        return self._is_content and self._grammar is not None and self._grammar.is_complete()

    @property
    def _is_content(self) -> bool:
        return self._states[-1].phase is Phase.CONTENT

    @property
    def _forced(self) -> int | None:
        """The token of the closing marker that must come next."""
        state = self._states[-1]
        return self._thoughts.markers.closing.longest[state.progress] if self._thoughts.is_spent(state) else None

    def allows(self, *tokens: int) -> bool:
        """Return whether these tokens may come next, one after the other."""
        if self._is_content:
            return self._grammar is None or self._grammar.allows(*tokens)
        num_taken = 0
        for token in tokens:
            if not self._allows(token):
                break
            self.take(token)
            num_taken += 1
        self.take_back(num_taken)
        return num_taken == len(tokens)

    def _allows(self, token: int) -> bool:
        if (forced := self._forced) is not None:
            return token == forced
        if self._grammar is None:
            return True
        if self._states[-1].phase is Phase.THOUGHTS:
            return token not in self._closing_too_far()
        return token in self._leading() or (self._content is not None and self._content.allows(token))

    def _closing_too_far(self) -> frozenset[int]:
        """Return the tokens that close the thoughts and begin the content, which its grammar could not follow."""
        return self._thoughts.markers.closing.beyond[self._states[-1].progress]

    def _leading(self) -> set[int]:
        """Return the tokens that may come before the content."""
        state, markers = self._states[-1], self._thoughts.markers
        leading: set[int] = set()
        if state.may_open:
            leading |= markers.opening.going_on[state.progress]
        if not state.progress:
            leading |= {token for token, length in markers.blank.items() if state.num_blank + length <= MAX_BLANK}
        return leading

    def mask(self, vocab_size: int) -> np.ndarray:
        """Return which tokens may come next, bool [V]. Raises RequestError."""
        if (forced := self._forced) is not None:
            return _only([forced], vocab_size)
        if self._grammar is None:
            return np.ones(vocab_size, bool)
        if self._states[-1].phase is Phase.THOUGHTS:
            return ~_only(self._closing_too_far(), vocab_size)
        content = self._content
        if self._is_content and content is not None:
            return content.mask(vocab_size)
        leading = _only(self._leading(), vocab_size)
        return leading if content is None else leading | content.mask(vocab_size)

    def forces_bytes(self) -> bool:
        """Return whether only one byte may come next."""
        if self._is_content:
            return self._grammar is not None and self._grammar.forces_bytes()
        return self._forced is not None

    def only_token(self) -> int | None:
        """Return the token that must come next, None where there are several or none."""
        if self._is_content:
            return None if self._grammar is None else self._grammar.only_token()
        return self._forced

    def forced_tokens(self) -> list[int]:
        """See CompiledGrammar."""
        return self._grammar.forced_tokens() if self._is_content and self._grammar is not None else []


Constraint = CompiledGrammar | ThoughtGate
"""What a text follows, token by token."""


def _only(tokens: "list[int] | set[int] | frozenset[int]", vocab_size: int) -> np.ndarray:
    is_one_V = np.zeros(vocab_size, bool)
    is_one_V[list(tokens)] = True
    return is_one_V


def constraint_of(grammar: Grammar | None, thoughts: Thoughts | None) -> Constraint | None:
    """Return what a text must follow, at its beginning; None where any text is allowed. A grammar counts where it is
    compiled."""
    compiled = None if grammar is None else grammar.compiled
    content = compiled.copy() if isinstance(compiled, CompiledGrammar) else None
    if thoughts is None or thoughts.phase is Phase.CONTENT or (content is None and thoughts.budget is None):
        return content
    return ThoughtGate(thoughts, content)
