"""Recorded answers drafted for again: which of their tokens would have been accepted is counted, seconds are those of
known costs."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnidraft import throttle
from omnidraft.config import SchedulerSettings
from omnidraft.decode.decoder import Decoder, SequenceOutput
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.decode.sequence import SequenceState
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import Proposer
from omnidraft.vocab.tokenizer import Vocabulary
from omnidraft.whatif.known_costs import KnownCosts
from omnidraft.whatif.recorded_target import RecordedTarget
from omnidraft.whatif.recorded_texts import RecordedText


@dataclass(slots=True)
class Counts:
    """What one answer would have taken."""

    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0
    """From its first pass to its last, beside the other texts; what the target takes to read its prompt is left out."""


class Replay:
    """Drafts for recorded answers. Without a proposer they are decoded plainly."""

    def __init__(
        self,
        target: RecordedTarget,
        vocabulary: Vocabulary,
        costs: KnownCosts,
        num_texts: int = 1,
        proposer: Proposer | None = None,
        recent: RecentTexts | None = None,
    ) -> None:
        """
        Args:
            num_texts: answers that decode at a time.
            recent: remembers the answers for the proposer.
        """
        self._target, self._vocabulary, self._costs = target, vocabulary, costs
        self._num_texts, self._proposer = num_texts, proposer
        self._recent = recent or RecentTexts(0)
        self._running: dict[SequenceState, Counts] = {}

    def run(self, texts: Sequence[RecordedText], advance: Callable[[], None] = lambda: None) -> list[Counts]:
        """Return the counts of each answer."""
        decoder = Decoder(
            self._target,
            self._vocabulary,
            costs=self._costs,
            scheduling=SchedulerSettings(max_num_seqs=self._num_texts),
        )
        counts, waiting = [Counts() for _ in texts], deque(enumerate(texts))
        while waiting or self._running:
            while waiting and len(self._running) < self._num_texts:
                number, text = waiting.popleft()
                self._running[self._begin(decoder, text)] = counts[number]
            throttle.rest()
            outputs = decoder.step()
            self._count(outputs)
            for output in outputs:
                if output.error is not None:
                    raise output.error
                if output.sequence.is_finished:
                    del self._running[output.sequence]
                    advance()
        decoder.close()
        return counts

    def _begin(self, decoder: Decoder, text: RecordedText) -> SequenceState:
        self._target.expect(text.request.prompt_ids, text.answer_ids)
        sequence = decoder.add(text.request, self._proposer)
        sequence.observers = (TextMemorizer(self._recent, text.request),)
        return sequence

    def _count(self, outputs: Sequence[SequenceOutput]) -> None:
        steps = [(self._running[output.sequence], output.step) for output in outputs if output.step is not None]
        if not steps:
            return  # it read prompts alone
        round_s = self._costs.round_s([step.tree for _, step in steps])
        for counts, step in steps:
            counts.num_tokens += len(step.emitted)
            counts.num_passes += 1
            counts.seconds += round_s
