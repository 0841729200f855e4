"""Ways to draft beside each other on the same recorded answers."""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from omnidraft import throttle
from omnidraft.assembly import Vocabularies
from omnidraft.assembly.drafting import drafter_of, memory_proposer, proposer, shared_drafting
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.registries import named_folder
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.config import NO_DRAFTER, DecodeSettings, SchedulerSettings, Settings
from omnidraft.decode.decoder import Decoder, SequenceOutput
from omnidraft.decode.drafting.suffix_source import SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.decode.recording.text_memorizer import TextMemorizer
from omnidraft.decode.sequence import SequenceState
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import Proposer
from omnidraft.progress import bar, stages
from omnidraft.snapshots.manifest import Manifest
from omnidraft.stats import Ratio
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif.known_costs import BASE, LEARNED, KnownCosts, MachineCosts
from omnidraft.whatif.recorded_target import RecordedTarget
from omnidraft.whatif.recorded_texts import RecordedText


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft."""

    drafter: str
    """A snapshot's folder, version or alias; `base`, or `none`: memory alone."""
    num_draft_tokens: int
    has_memory: bool

    def __str__(self) -> str:
        if not self.num_draft_tokens:
            return "plain decoding (none, memory off)"
        return f"{self.drafter}, {self.num_draft_tokens} tokens, memory {'on' if self.has_memory else 'off'}"


PLAIN = Choice(NO_DRAFTER, 0, has_memory=False)


@dataclass(slots=True)
class Counts:
    """What one answer would have taken."""

    num_tokens: int = 0
    num_passes: int = 0
    seconds: float = 0.0
    """From its first pass to its last, beside the other texts; what the target takes to read its prompt is left out."""


def choices(drafters: Iterable[str], num_draft_tokens: Iterable[int], memories: Iterable[bool]) -> list[Choice]:
    """Return plain decoding, and all combinations that draft anything, those of a drafter together."""
    combined = (Choice(*each) for each in product(drafters, num_draft_tokens, memories))
    return [PLAIN, *(choice for choice in combined if choice.has_memory or choice.drafter != NO_DRAFTER)]


def manifest_of(settings: Settings, drafter: str) -> Manifest | None:
    """Return the manifest of a choice's drafter, None where that is no snapshot. Raises SnapshotError."""
    if drafter in (BASE, NO_DRAFTER):
        return None
    stages.info("reading snapshot %s", drafter)
    with named_folder(settings, drafter) as (version, _):
        return version.manifest


class Comparison:
    """Replays one log's answers for any choice, `num_texts` at a time, with the costs of one machine."""

    def __init__(
        self,
        settings: Settings,
        tokenizers: Vocabularies,
        texts: Sequence[RecordedText],
        costs: MachineCosts,
        num_texts: int,
    ) -> None:
        self._settings, self._tokenizers = settings, tokenizers
        self._texts, self._costs, self._num_texts = texts, costs, num_texts
        self._target = RecordedTarget(len(tokenizers.target.vocabulary))
        self._loaded = lru_cache(1)(self._load)

    def run(self, choice: Choice) -> list[Counts]:
        """Return what each answer would have taken: tokens that are accepted are counted, seconds are those of the
        costs. Raises SnapshotError for a drafter that there is not."""
        chosen = {"num_draft_tokens": choice.num_draft_tokens, "suffix_memory": choice.has_memory}
        decode = self._settings.decode.model_copy(update=chosen)
        costs, recent = self._known(choice.drafter), RecentTexts() if choice.has_memory else RecentTexts(0)
        drafted = self._proposer(choice.drafter, decode, costs, recent)
        num_drafted, num_remembered = choice.num_draft_tokens, decode.num_memory_tokens
        scheduling = SchedulerSettings(max_num_seqs=self._num_texts)
        decoder = Decoder(self._target, self._tokenizers.target.vocabulary, costs=costs, scheduling=scheduling)
        counts, waiting = [Counts() for _ in self._texts], deque(enumerate(self._texts))
        running: dict[SequenceState, Counts] = {}
        with bar(str(choice), len(counts)) as advance, closing(decoder):
            while waiting or running:
                while waiting and len(running) < self._num_texts:
                    number, text = waiting.popleft()
                    self._target.expect(text.request.prompt_ids, text.answer_ids)
                    request = replace(text.request, num_draft_tokens=num_drafted, num_memory_tokens=num_remembered)
                    sequence = decoder.add(request, drafted)
                    sequence.observers = (TextMemorizer(recent, request),)
                    running[sequence] = counts[number]
                throttle.rest()
                outputs = decoder.step()
                _count(outputs, running, costs)
                for output in outputs:
                    if output.error is not None:
                        raise output.error
                    if output.sequence.is_finished:
                        del running[output.sequence]
                        advance()
        return counts

    def _proposer(self, name: str, decode: DecodeSettings, costs: KnownCosts, recent: RecentTexts) -> Proposer:
        """Return a proposer that has measured and learned nothing yet."""
        shared = shared_drafting(decode, costs, recent, has_drafter=name != NO_DRAFTER)
        if name == NO_DRAFTER:
            return memory_proposer(decode, self._tokenizers, shared)
        loaded = self._loaded(name)
        drafter = drafter_of(loaded)
        (fleet,) = (each.fleet for each in loaded.sources if isinstance(each, SuffixSource))
        own = drafter.model, drafter.cache.copy(), fleet, drafter.factors
        return proposer(decode, self._tokenizers, shared, *own)

    def _load(self, name: str) -> TreeProposer:
        """Load what a drafter drafts with. Nothing drafts with this itself, since that would teach it."""
        stages.info("loading drafter %s", name)
        decode = self._settings.decode.model_copy(update={"suffix_memory": True})
        settings = self._settings.model_copy(update={"decode": decode})
        metrics, costs = CountingMetrics(), self._known(name)
        host = DecodingHost(settings, metrics, self._tokenizers, loaded_target=self._target, costs=costs)
        snapshot = named_or_base(settings, host.load, None if name == BASE else name)
        assert isinstance(snapshot.proposer, TreeProposer)
        return snapshot.proposer

    def _known(self, drafter: str) -> KnownCosts:
        return KnownCosts(self._costs, BASE if drafter in (BASE, NO_DRAFTER) else LEARNED)


def _count(outputs: Iterable[SequenceOutput], running: Mapping[SequenceState, Counts], costs: KnownCosts) -> None:
    steps = [(running[output.sequence], output.step) for output in outputs if output.step is not None]
    round_s = costs.round_s([step.tree for _, step in steps]) if steps else 0.0  # without one it read prompts alone
    for counts, step in steps:
        counts.num_tokens += len(step.emitted)
        counts.num_passes += 1
        counts.seconds += round_s


def summary(counts: Sequence[Counts], plain: Sequence[Counts]) -> dict[str, float]:
    """Return tokens a pass, the tokens per second of a text, and the speed-up with its standard error, each answer
    taken as one draw."""
    speedup, tokens = Ratio(), sum(each.num_tokens for each in counts)
    for drafted, alone in zip(counts, plain, strict=True):
        speedup.add(alone.seconds, drafted.seconds)
    return {
        "tokens_per_pass": tokens / sum(each.num_passes for each in counts),
        "tokens_per_s": tokens / sum(each.seconds for each in counts),
        "speedup": speedup.estimate,
        "speedup_error": speedup.error,
    }


def best_by_group(
    texts: Sequence[RecordedText], counts: Mapping[str, Sequence[Counts]]
) -> dict[tuple[str, str], tuple[str, float, int]]:
    """Return, for each tenant and kind of work, the fastest choice, its speed-up and the number of answers."""
    numbers = defaultdict[tuple[str, str], list[int]](list)
    for number, text in enumerate(texts):
        numbers[text.request.tenant, text.work].append(number)
    best = {}
    for group, own in sorted(numbers.items()):
        plain_s = sum(counts[str(PLAIN)][number].seconds for number in own)
        speedups = {name: plain_s / sum(each[number].seconds for number in own) for name, each in counts.items()}
        fastest = max(speedups.items(), key=lambda each: each[1])
        best[group] = (*fastest, len(own))
    return best
