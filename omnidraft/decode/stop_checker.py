"""Stop conditions and the text that may be shown: complete UTF-8, without the stop token or stop string.

Stop strings are matched on bytes, so they are found across token boundaries. They are sought behind the thoughts of an
answer, not in them.
"""

import codecs

from omnidraft.errors import RequestError
from omnidraft.ports import FinishReason, Request
from omnidraft.vocab.thoughts import Phase
from omnidraft.vocab.tokenizer import Vocabulary


class StopChecker:
    """Follows the tokens of one answer, decides when it ends and which text may be shown."""

    def __init__(self, request: Request, vocabulary: Vocabulary) -> None:
        """Raises RequestError where a stop string is no text: what ended the answer could not be told."""
        try:
            self._stop_strings = {stop: stop.decode() for stop in request.stop_strings}
        except UnicodeDecodeError as exc:
            raise RequestError(f"stop: {exc.object!r} is not UTF-8; give whole characters") from None
        self._request = request
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._pending = b""
        self._num_emitted = 0
        self._state = None if request.thoughts is None else request.thoughts.start
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self.finish_reason: FinishReason | None = None
        self.stop_string: str | None = None
        """The stop string that ended the answer, if one did."""

    def ends(self, token: int) -> bool:
        """Add one emitted token; return True when the answer ends with it."""
        self._num_emitted += 1
        if token in self._request.stop_ids:
            self.finish_reason = FinishReason.STOP
            return True
        self._pending += self._request.shown_ids.get(token) or self._vocabulary.spell((token,))
        if self._request.thoughts is not None and self._state is not None:
            self._state = self._request.thoughts.after(self._state, token)
        start = len(self._pending) - self._num_content
        matches = [(at, stop) for stop in self._stop_strings if (at := self._pending.find(stop, start)) >= 0]
        if matches:
            at, stop = min(matches)
            at += len(stop) * self._request.keeps_stop
            self._pending, self.stop_string = self._pending[:at], self._stop_strings[stop]
            self.finish_reason = FinishReason.STOP
        elif self._num_emitted >= self._request.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    @property
    def _num_content(self) -> int:
        """The bytes at the end of what is pending that may hold a stop string."""
        num_content = len(self._pending) if self._state is None else max(self._state.num_content, 0)
        return min(num_content, len(self._pending))

    @property
    def _num_undecided(self) -> int:
        """The bytes at the end of what is pending that are content, or the beginning of thoughts."""
        return 0 if self._state is None or self._state.phase is not Phase.LEAD else self._state.progress

    def take(self) -> str:
        """Return the text that can be shown now; a suffix that may become a stop string is held back."""
        cut = len(self._pending)
        if self.finish_reason is None:
            cut -= max(self._possible_stop_length(), self._num_undecided)
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return self._utf8.decode(shown, final=self.finish_reason is not None)

    def _possible_stop_length(self) -> int:
        """Return the length of the longest suffix that is a prefix of a stop string."""
        for length in range(min(self._longest_stop, self._num_content), 0, -1):
            tail = self._pending[-length:]
            if any(stop.startswith(tail) for stop in self._stop_strings):
                return length
        return 0
