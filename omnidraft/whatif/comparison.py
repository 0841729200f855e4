"""Ways to draft beside each other on the same recorded answers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from omnidraft.assembly import Vocabularies
from omnidraft.assembly.drafting import drafter_of, memory_proposer, proposer, shared_drafting
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.registries import named_folder
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.config import NO_DRAFTER, DecodeSettings, Settings
from omnidraft.decode.drafting.suffix_source import SuffixSource
from omnidraft.decode.drafting.tree_proposer import TreeProposer
from omnidraft.memory.recent_texts import RecentTexts
from omnidraft.ports import Proposer
from omnidraft.progress import bar, stages
from omnidraft.snapshots.manifest import Manifest
from omnidraft.stats import Ratio
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif.known_costs import BASE, LEARNED, KnownCosts, MachineCosts
from omnidraft.whatif.recorded_target import RecordedTarget
from omnidraft.whatif.recorded_texts import RecordedText
from omnidraft.whatif.replay import Counts, Replay

PLAIN = "plain decoding (none, memory off)"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft."""

    drafter: str
    """A snapshot's folder, version or alias; `base`, or `none`: memory alone."""
    num_draft_tokens: int
    has_memory: bool

    def __str__(self) -> str:
        return f"{self.drafter}, {self.num_draft_tokens} tokens, memory {'on' if self.has_memory else 'off'}"


def choices(drafters: Iterable[str], num_draft_tokens: Iterable[int], memories: Iterable[bool]) -> list[Choice]:
    """Return all combinations that draft anything, those of a drafter together."""
    combined = (Choice(*each) for each in product(drafters, num_draft_tokens, memories))
    return [choice for choice in combined if choice.has_memory or choice.drafter != NO_DRAFTER]


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
        *,
        num_texts: int = 1,
    ) -> None:
        self._settings, self._tokenizers = settings, tokenizers
        self._texts, self._costs, self._num_texts = texts, costs, num_texts
        self._target = RecordedTarget(len(tokenizers.target.vocabulary))
        self._loaded = lru_cache(1)(self._load)

    def plain(self) -> list[Counts]:
        """Return what plain decoding would have taken."""
        return self._replayed(PLAIN, self._texts, self._known(NO_DRAFTER))

    def run(self, choice: Choice) -> list[Counts]:
        """Return what each answer would have taken. Raises SnapshotError for a drafter that there is not."""
        chosen = {"num_draft_tokens": choice.num_draft_tokens, "suffix_memory": choice.has_memory}
        decode = self._settings.decode.model_copy(update=chosen)
        costs, recent = self._known(choice.drafter), RecentTexts() if choice.has_memory else RecentTexts(0)
        drafted = self._proposer(choice.drafter, decode, costs, recent)
        chosen = {"num_draft_tokens": choice.num_draft_tokens, "num_memory_tokens": decode.num_memory_tokens}
        texts = [replace(each, request=replace(each.request, **chosen)) for each in self._texts]
        return self._replayed(str(choice), texts, costs, drafted, recent)

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
        loaded = {"loaded_target": self._target, "costs": self._known(name)}
        host = DecodingHost(settings, CountingMetrics(), self._tokenizers, **loaded)  # type: ignore[arg-type]
        snapshot = named_or_base(settings, host.load, None if name == BASE else name)
        assert isinstance(snapshot.proposer, TreeProposer)
        return snapshot.proposer

    def _known(self, drafter: str) -> KnownCosts:
        return KnownCosts(self._costs, BASE if drafter in (BASE, NO_DRAFTER) else LEARNED)

    def _replayed(self, title: str, texts: Sequence[RecordedText], costs: KnownCosts, *drafting: Any) -> list[Counts]:
        replay = Replay(self._target, self._tokenizers.target.vocabulary, costs, self._num_texts, *drafting)
        with bar(title, len(texts)) as advance:
            return replay.run(texts, advance)


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
    texts: Sequence[RecordedText], counts: Mapping[str, Sequence[Counts]], plain: Sequence[Counts]
) -> dict[tuple[str, str], tuple[str, float, int]]:
    """Return, for each tenant and kind of work, the fastest choice, its speed-up and the number of answers."""
    numbers = defaultdict[tuple[str, str], list[int]](list)
    for number, text in enumerate(texts):
        numbers[text.request.tenant, text.work].append(number)
    best = {}
    for group, own in sorted(numbers.items()):
        plain_s = sum(plain[number].seconds for number in own)
        speedups = {name: plain_s / sum(each[number].seconds for number in own) for name, each in counts.items()}
        fastest = max(speedups.items(), key=lambda each: each[1])
        best[group] = (*fastest, len(own))
    return best
