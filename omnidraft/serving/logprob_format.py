"""Log-probabilities in OpenAI's two shapes: one entry a token, with its spelling and where it stands in the text.

They are those of the target itself: before penalties, biases, grammar, temperature and cuts, as OpenAI's and vLLM's. A
token's entry goes out with the text that it put something into; a stop token, and what lies wholly behind a stop
string's beginning, has none. An entry whose token is cut by a stop string spells all of the token.
"""

import codecs
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from omnidraft.ports import LogProbs, Step
from omnidraft.serving.response_schemas import ChatLogProbs, ChatToken, CompletionLogProbs, TokenLogProb
from omnidraft.vocab.tokenizer import Vocabulary

LEAST = -9999.0
"""Stands for anything below, as OpenAI writes what is next to impossible."""
BROKEN = "\ufffd"
"""What a reader sees of bytes that are no text."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One emitted token."""

    token: int
    log_p: float
    likeliest: tuple[tuple[int, float], ...]
    offset: int
    """Characters of the text before it; a character in several tokens begins with its first."""


class LogprobEntries:
    """Of one text, as it grows."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_spelled = 0
        self._num_shown = 0
        self._held: deque[LogprobEntry] = deque()

    def take(self, step: Step) -> list[LogprobEntry]:
        """Of the tokens that the text shown up to this step is made of, those not told before."""
        assert step.log_probs is not None
        for token, told in zip(step.emitted, _rows(step.log_probs), strict=True):
            self._held.append(LogprobEntry(token, *told, offset=self._spell(token)))
        self._num_shown += len(step.text)
        entries = []
        while self._held and self._held[0].offset < self._num_shown:
            entries.append(self._held.popleft())
        return entries

    def _spell(self, token: int) -> int:
        """Where the token begins: inside a character that it goes on with, behind one that it leaves broken."""
        token_bytes, was_inside = self._vocabulary.spell((token,)), bool(self._utf8.getstate()[0])
        first = self._utf8.decode(token_bytes[:1])
        offset = self._num_spelled + (was_inside and first.startswith(BROKEN))
        self._num_spelled += len(first) + len(self._utf8.decode(token_bytes[1:]))
        return offset


def _rows(told: LogProbs) -> Iterable[tuple[float, tuple[tuple[int, float], ...]]]:
    return zip(told.emitted, told.likeliest, strict=True)


def for_completion(entries: Sequence[LogprobEntry], vocabulary: Vocabulary) -> CompletionLogProbs:
    """Four lists; the emitted token is among its `top_logprobs` whether it is one of the likeliest or not."""
    return CompletionLogProbs(
        tokens=[spelled(each.token, vocabulary) for each in entries],
        token_logprobs=[max(each.log_p, LEAST) for each in entries],
        top_logprobs=[_with_emitted(each, vocabulary) for each in entries],
        text_offset=[each.offset for each in entries],
    )


def for_chat(entries: Sequence[LogprobEntry], vocabulary: Vocabulary) -> ChatLogProbs:
    """An object a token, with its bytes."""
    content = []
    for each in entries:
        likeliest = [_token(token, log_p, vocabulary) for token, log_p in each.likeliest]
        own = _token(each.token, each.log_p, vocabulary)
        content.append(ChatToken(token=own.token, logprob=own.logprob, bytes=own.bytes, top_logprobs=likeliest))
    return ChatLogProbs(content=content)


def spelled(token: int, vocabulary: Vocabulary) -> str:
    """Its text; `bytes:` and escapes when it is no whole text, `id:` and its number when it spells nothing."""
    spelled_bytes = vocabulary.spell((token,))
    if not spelled_bytes:
        return f"id:{token}"
    try:
        return spelled_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled_bytes)


def _with_emitted(entry: LogprobEntry, vocabulary: Vocabulary) -> dict[str, float]:
    if not entry.likeliest:
        return {}
    told = dict(entry.likeliest) | {entry.token: entry.log_p}
    return {spelled(token, vocabulary): max(log_p, LEAST) for token, log_p in told.items()}


def _token(token: int, log_p: float, vocabulary: Vocabulary) -> TokenLogProb:
    own_bytes = list(vocabulary.spell((token,)))
    return TokenLogProb(token=spelled(token, vocabulary), logprob=max(log_p, LEAST), bytes=own_bytes)
