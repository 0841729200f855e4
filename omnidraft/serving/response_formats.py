"""The parts of a choice, and log-probabilities in OpenAI's two shapes.

Log-probabilities are the target's own: before penalties, biases, grammar, temperature and cuts, as OpenAI's and
vLLM's. The entry of a token is sent with the text that the token contributes to. A stop token has none, nor has a token
wholly behind the beginning of a stop string, unless the request asks for the ids or an echo. An entry whose token is
cut by a stop string spells the whole token.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from omnidraft.decode.drafted_spans import DraftedSpan, TokenOffsets
from omnidraft.decode.teacher_forcing import PromptToken
from omnidraft.ports import Step
from omnidraft.serving.response_schemas import FinishReason, Json
from omnidraft.vocab.tokenizer import Vocabulary

MIN_LOGPROB = -9999.0
"""The value that stands for all smaller ones, as in OpenAI's API."""


@dataclass(frozen=True, slots=True)
class LogprobEntry:
    """One emitted token."""

    token: int
    log_p: float | None
    """None for the first of a prompt."""
    likeliest: tuple[tuple[int, float], ...]
    offset: int
    """Number of characters of the text before it; a character of several tokens begins with the first of them."""


class LogprobCollector:
    """Collects the entries of one text while it is decoded."""

    def __init__(self, vocabulary: Vocabulary, shown_ids: Mapping[int, bytes], *, tells_all: bool = False) -> None:
        """`shown_ids` are those of the text's request; see ports.Request. With `tells_all` every token has its entry,
        in the step that emits it: clients that ask for ids, or for the prompt's, count them."""
        self._offsets, self._tells_all = TokenOffsets(vocabulary, shown_ids), tells_all
        self._num_sent = 0
        self._pending: deque[LogprobEntry] = deque()

    def take(self, step: Step) -> list[LogprobEntry]:
        """Return the entries of tokens that the text sent up to this step contains, each of them once."""
        told = step.log_probs
        assert told is not None
        for token, log_p, likeliest in zip(step.emitted, told.emitted, told.likeliest, strict=True):
            self._pending.append(LogprobEntry(token, log_p, likeliest, self._offsets.offset(token)))
        self._num_sent += len(step.text)
        entries = []
        while self._pending and (self._tells_all or self._pending[0].offset < self._num_sent):
            entries.append(self._pending.popleft())
        return entries


NameOf = Callable[[int], str]
"""How tokens are written in log-probabilities."""


def for_completion(entries: Sequence[LogprobEntry], name_of: NameOf) -> Json:
    """Return the four lists of a completion; a `top_logprobs` that is not empty includes the emitted token."""
    return {
        "tokens": [name_of(each.token) for each in entries],
        "token_logprobs": [None if each.log_p is None else max(each.log_p, MIN_LOGPROB) for each in entries],
        "top_logprobs": [_with_emitted(each, name_of) for each in entries],
        "text_offset": [each.offset for each in entries],
    }


def echoed(prompt: Sequence[int], scored: Sequence[PromptToken], vocabulary: Vocabulary) -> list[LogprobEntry]:
    """Return the entries of a prompt's tokens, which stand before those of the answer where it is echoed."""
    offsets = TokenOffsets(vocabulary, {})
    first = [LogprobEntry(token, None, (), offsets.offset(token)) for token in prompt[:1]]
    return first + [LogprobEntry(each.token, each.log_p, each.likeliest, offsets.offset(each.token)) for each in scored]


def for_chat(entries: Sequence[LogprobEntry], name_of: NameOf, vocabulary: Vocabulary) -> Json:
    """Return an object for each token, with its bytes."""

    def told(token: int, log_p: float) -> Json:
        own_bytes = list(vocabulary.spell((token,)))
        return {"token": name_of(token), "logprob": max(log_p, MIN_LOGPROB), "bytes": own_bytes}

    content = []
    for each in entries:
        assert each.log_p is not None  # an answer's
        content.append({**told(each.token, each.log_p), "top_logprobs": [told(*other) for other in each.likeliest]})
    return {"content": content, "refusal": None}


def for_prompt(tokens: Sequence[PromptToken], vocabulary: Vocabulary) -> list[Json | None]:
    """Return vLLM's entries of a prompt: none for the first token, then the token's own and the likeliest, by id."""
    shown: list[Json | None] = [None]
    for each in tokens:
        entries = {token: (log_p, rank) for rank, (token, log_p) in enumerate(each.likeliest, start=1)}
        entries.setdefault(each.token, (each.log_p, each.rank))
        shown.append(
            {
                str(token): {
                    "logprob": max(log_p, MIN_LOGPROB),
                    "rank": rank,
                    "decoded_token": token_text(token, vocabulary),
                }
                for token, (log_p, rank) in entries.items()
            }
        )
    return shown


def token_text(token: int, vocabulary: Vocabulary) -> str:
    """Return the text of a token; `bytes:` and escapes if it is not UTF-8, `id:` and its id if it spells nothing."""
    token_bytes = vocabulary.spell((token,))
    if not token_bytes:
        return f"id:{token}"
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _with_emitted(entry: LogprobEntry, name_of: NameOf) -> dict[str, float] | None:
    if entry.log_p is None:
        return None
    if not entry.likeliest:
        return {}
    log_p_of: dict[str, float] = {}
    for token, log_p in entry.likeliest:  # the likeliest first, which stands for others that are spelled alike
        log_p_of.setdefault(name_of(token), log_p)
    log_p_of[name_of(entry.token)] = entry.log_p
    return {text: max(log_p, MIN_LOGPROB) for text, log_p in log_p_of.items()}


@dataclass(slots=True)
class NamedCall:
    """A part of one call of a tool, or all of it."""

    index: int
    id: str | None
    """It and the name are in the first part of a call only."""
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Thought:
    """A part of what the model thinks before it answers."""

    text: str


@dataclass(slots=True)
class ChoicePart:
    """A part of one choice, or all of it."""

    index: int
    is_first: bool
    pieces: list[str | NamedCall | Thought] = field(default_factory=list)
    """Its text, thoughts and calls, in the order in which they are written."""
    finish_reason: FinishReason | None = None
    entries: list[LogprobEntry] | None = None
    """Log-probabilities of its tokens; None unless the request asks for them."""
    spans: list[DraftedSpan] = field(default_factory=list)
    """Who drafted the text, piece by piece, where the request asks for figures of a stream."""
    stop_string: str | None = None
    """The stop string that ended it, if one did."""
    token_ids: list[int] = field(default_factory=list)
    """The ids that the target drew."""
    receipt: Json | None = None
    """The signed receipt of all of it, where it ends and the request asks for one."""

    @property
    def text(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def thoughts(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Thought))

    @property
    def calls(self) -> list[NamedCall]:
        return [piece for piece in self.pieces if isinstance(piece, NamedCall)]

    def add(self, part: "ChoicePart") -> None:
        """Append the next part."""
        self.finish_reason, self.stop_string, self.receipt = part.finish_reason, part.stop_string, part.receipt
        self.token_ids += part.token_ids
        if part.entries is not None:
            self.entries = (self.entries or []) + part.entries
        for piece in part.pieces:
            last = self.pieces[-1] if self.pieces else None
            if isinstance(piece, NamedCall) and piece.id is None:
                assert isinstance(last, NamedCall)
                last.arguments += piece.arguments
            else:
                self.pieces.append(piece)
