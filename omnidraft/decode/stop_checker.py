"""What a reader sees of the emitted ids: complete UTF-8, and nothing of the stop token or stop string.

Stop strings are looked for in bytes, so they are found across token borders.
"""

import codecs

from omnidraft.ports import FinishReason, Request
from omnidraft.vocab.tokenizer import Vocabulary


class StopChecker:
    """Watches one answer grow; decides when it is over and which text may be shown already."""

    def __init__(self, request: Request, vocabulary: Vocabulary) -> None:
        self._request = request
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = b""
        self._num_emitted = 0
        self._longest_stop = max((len(stop) for stop in request.stop_strings), default=0)
        self.finish_reason: FinishReason | None = None

    def ends(self, token: int) -> bool:
        """Take one emitted token; True when the answer is over with it."""
        self._num_emitted += 1
        if token in self._request.stop_ids:
            self.finish_reason = FinishReason.STOP
            return True
        self._held += self._vocabulary.spell((token,))
        found = [at for stop in self._request.stop_strings if (at := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.finish_reason = FinishReason.STOP
        elif self._num_emitted >= self._request.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH
        return self.finish_reason is not None

    def take(self) -> str:
        """Text that can be shown now; a beginning that may yet become a stop string is held back."""
        cut = len(self._held)
        if self.finish_reason is None:
            cut -= self._possible_stop_length()
        shown, self._held = self._held[:cut], self._held[cut:]
        return self._utf8.decode(shown, final=self.finish_reason is not None)

    def _possible_stop_length(self) -> int:
        """Length of the longest tail that is the beginning of a stop string."""
        for length in range(min(self._longest_stop, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._request.stop_strings):
                return length
        return 0
