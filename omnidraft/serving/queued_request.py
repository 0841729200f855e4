"""One request on its way: the texts it asks for, and the steps that the decoding thread hands to whoever reads them."""

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from omnidraft.decode.engine import Engine, GenerationRequest, GenerationStream
from omnidraft.decode.step_stats import DecodeStats
from omnidraft.ports import Step


@dataclass(slots=True)
class QueuedText:
    """One of the texts that a request asks for."""

    question: GenerationRequest
    figures: DecodeStats = field(default_factory=DecodeStats)
    answer: GenerationStream | None = None
    """None before its turn."""


class QueuedRequest:
    """A request's place in its engine's line. Its texts are decoded one after another, with one snapshot."""

    def __init__(
        self,
        engine: Engine,
        questions: Sequence[GenerationRequest],
        *,
        payer: str = "default",
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            payer: whose share of the engine's time it takes.
            wake: called by the decoding thread whenever there is something to read; must return at once.
        """
        self.engine = engine
        self.texts = tuple(QueuedText(question) for question in questions)
        self.client = payer
        self.is_abandoned = False
        """Nobody reads any more: the text under way is given up at its next step."""
        self._wake = wake
        self._results: queue.SimpleQueue[tuple[int, Step] | Exception | None] = queue.SimpleQueue()

    @property
    def request_id(self) -> str:
        return self.texts[0].question.request_id

    @property
    def figures(self) -> DecodeStats:
        """Of all texts together."""
        return sum((text.figures for text in self.texts[1:]), self.texts[0].figures)

    def put(self, result: tuple[int, Step] | Exception | None) -> None:
        """The next step with its text's index; an exception or None is the last one."""
        self._results.put(result)
        self._wake()

    def pieces(self) -> Iterator[tuple[int, Step]]:
        """Steps as they come, with the index of their text; for a thread. Raises what decoding raised."""
        while (result := self._results.get()) is not None:
            if isinstance(result, Exception):
                raise result
            yield result

    def arrived(self) -> Iterator[tuple[int, Step] | None]:
        """What can be read without waiting; None is the end. Raises what decoding raised."""
        while not self._results.empty():
            result = self._results.get_nowait()
            if isinstance(result, Exception):
                raise result
            yield result
