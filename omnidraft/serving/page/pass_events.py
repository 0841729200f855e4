"""What the page is told of each pass of the target: tokens, drafted nodes, probabilities, milliseconds.

Letters: p is the target's probability, raw, before sampling settings; q is the drafter's.
"""

import codecs
from collections.abc import Iterable, Sequence
from math import exp
from typing import Any

from omnidraft.decode.prompting import Pair
from omnidraft.ports import DraftTree, Step
from omnidraft.traces.record import DRAFTER_SOURCES

NUM_LIKELIEST = 3
"""The most probable tokens that are shown with each emitted one."""

Event = dict[str, Any]


class PassEvents:
    """Turns the steps of one text into events, and its end into one more."""

    def __init__(self, pair: Pair) -> None:
        self._vocabulary = pair.target_tokenizer.vocabulary
        self._drafter_tokenizer = pair.drafter_tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._emitted: list[int] = []

    def of_pass(self, step: Step) -> Event:
        """Return the event of a step; its texts add up to the whole text, its bytes to those of all tokens."""
        drawn_from = (0, *step.path)[: len(step.emitted)]
        self._emitted += step.emitted
        spent = step.timings
        return {
            "tokens": [self._token(step, index) for index in range(len(step.emitted))],
            "nodes": self._nodes(step.tree, step.path, _known_log_p(step, drawn_from)),
            "draft_ms": _ms(spent.draft_s),
            "target_ms": _ms(spent.target_s),
            "other_ms": _ms(spent.other_s),
        }

    def of_end(self) -> Event:
        """Return what is known at the end only: all ids, and the same text as the drafter's tokens."""
        return {"ids": self._emitted, "drafter_tokens": self._drafter_tokens()}

    def _token(self, step: Step, index: int) -> Event:
        token = step.emitted[index]
        data = self._vocabulary.token_bytes[token]
        event: Event = {
            "id": token,
            "text": self._utf8.decode(data),
            "spelled": _shown(data),
            "num_bytes": len(data),
            "node": step.path[index] if index < len(step.path) else None,
        }
        if step.log_probs is not None:
            event["p"] = _probability(step.log_probs.emitted[index])
            event["likeliest"] = self._likeliest(step.log_probs.likeliest[index][:NUM_LIKELIEST])
        return event

    def _likeliest(self, tokens: Iterable[tuple[int, float]]) -> list[Event]:
        vocabulary = self._vocabulary
        return [{"spelled": _shown(vocabulary.token_bytes[token]), "p": _probability(log_p)} for token, log_p in tokens]

    def _nodes(self, tree: DraftTree, path: Sequence[int], known_log_p: dict[tuple[int, int], float]) -> list[Event]:
        """Return the drafted nodes in order; the first one is node 1, since the root is left out."""
        nodes = []
        for node in range(1, len(tree)):
            parent, token, source = tree.parents[node], tree.tokens[node], tree.sources[node]
            log_p = known_log_p.get((parent, token))
            nodes.append(
                {
                    "parent": parent,
                    "spelled": _shown(self._vocabulary.token_bytes[token]),
                    "source": str(source),
                    "q": _probability(tree.log_q[node]) if source in DRAFTER_SOURCES else None,
                    "expected": round(tree.acceptance[node], 4) if tree.acceptance else None,
                    "p": None if log_p is None else _probability(log_p),
                    "is_accepted": node in path,
                }
            )
        return nodes

    def _drafter_tokens(self) -> list[Event] | None:
        """Return the drafter's tokens of the text; None where it has no drafter, or spells it with other bytes."""
        if self._drafter_tokenizer is None:
            return None
        text_bytes = self._vocabulary.spell(self._emitted)
        ids = self._drafter_tokenizer.encode(text_bytes.decode("utf-8", "replace"))
        spelled = [self._drafter_tokenizer.vocabulary.token_bytes[token] for token in ids]
        if b"".join(spelled) != text_bytes:
            return None
        return [{"spelled": _shown(data), "num_bytes": len(data)} for data in spelled]


def _known_log_p(step: Step, drawn_from: Sequence[int]) -> dict[tuple[int, int], float]:
    """Return (node, token that may follow it) -> log p, as far as the target's log-probabilities were asked for."""
    if step.log_probs is None:
        return {}
    known = {
        (node, token): log_p
        for node, likeliest in zip(drawn_from, step.log_probs.likeliest, strict=True)
        for token, log_p in likeliest
    }
    return known | dict(zip(zip(drawn_from, step.emitted, strict=True), step.log_probs.emitted, strict=True))


def _shown(data: bytes) -> str:
    """Return the bytes of one token, which may be part of a character, as text."""
    return data.decode("utf-8", "backslashreplace")


def _probability(log_p: float) -> float:
    return round(exp(log_p), 4)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
