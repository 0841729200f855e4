"""Ways to draft beside each other on the same recorded answers."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from omnidraft import assembly
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.registries import named_folder
from omnidraft.assembly.snapshot_loading import base_drafter, named_or_base
from omnidraft.config import NO_DRAFTER, Settings
from omnidraft.ports import Request
from omnidraft.progress import bar
from omnidraft.snapshots.manifest import Manifest
from omnidraft.stats import Ratio
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif.known_costs import BASE, LEARNED, KnownCosts, MachineCosts
from omnidraft.whatif.recorded_target import RecordedTarget
from omnidraft.whatif.recorded_texts import RecordedText
from omnidraft.whatif.replay import Counts, Replay

PLAIN = "plain decoding"


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to draft."""

    drafter: str
    """A snapshot's folder, version or alias; `base`, or `none`: memory alone."""
    num_draft_tokens: int
    has_memory: bool

    def __str__(self) -> str:
        return f"{self.drafter}, {self.num_draft_tokens} tokens, memory {'on' if self.has_memory else 'off'}"

    @property
    def drafts(self) -> bool:
        """Whether anything drafts."""
        return self.num_draft_tokens > 0 and (self.has_memory or self.drafter != NO_DRAFTER)

    def applied_to(self, settings: Settings) -> Settings:
        """Return settings that draft so."""
        decode = {"num_draft_tokens": self.num_draft_tokens, "suffix_memory": self.has_memory}
        models = {"drafter": NO_DRAFTER} if self.drafter == NO_DRAFTER else {}
        changed = {
            "decode": settings.decode.model_copy(update=decode),
            "models": settings.models.model_copy(update=models),
        }
        return settings.model_copy(update=changed)


def choices(drafters: Iterable[str], num_draft_tokens: Iterable[int], memories: Iterable[bool]) -> list[Choice]:
    """Return all combinations that draft anything."""
    combined = (Choice(*each) for each in product(drafters, num_draft_tokens, memories))
    return [choice for choice in combined if choice.drafts]


def manifest_of(settings: Settings, drafter: str) -> Manifest | None:
    """Return the manifest of a choice's drafter, None where that is no snapshot. Raises SnapshotError."""
    if drafter in (BASE, NO_DRAFTER):
        return None
    with named_folder(settings, drafter) as (version, _):
        return version.manifest


class Comparison:
    """Replays one log's answers for any choice, `num_texts` at a time, with the costs of one machine."""

    def __init__(
        self, settings: Settings, texts: Sequence[RecordedText], costs: MachineCosts, *, num_texts: int = 1
    ) -> None:
        self._settings, self._texts, self._num_texts = settings, texts, num_texts
        self._tokenizers = assembly.vocabularies(settings)
        self._target = RecordedTarget(len(self._tokenizers.target.vocabulary))
        self._base = base_drafter(settings, self._tokenizers)
        self._costs = costs

    def plain(self) -> list[Counts]:
        """Return what plain decoding would have taken."""
        return self._replayed(Replay(self._target, self._vocabulary, KnownCosts(self._costs), self._num_texts), PLAIN)

    def run(self, choice: Choice) -> list[Counts]:
        """Return what each answer would have taken. Raises SnapshotError for a drafter that there is not."""
        settings = choice.applied_to(self._settings)
        tokenizers = self._tokenizers if settings.models.has_drafter else assembly.served_vocabularies(settings)
        name = None if choice.drafter in (BASE, NO_DRAFTER) else choice.drafter
        costs = KnownCosts(self._costs, LEARNED if name else BASE)
        loaded = {"loaded_target": self._target, "costs": costs, "base": self._base}
        host = DecodingHost(settings, CountingMetrics(), tokenizers, **loaded)  # type: ignore[arg-type]
        snapshot = named_or_base(settings, host.load, name)

        def prepare(request: Request) -> Request:
            return replace(
                request,
                drafter_prompt_ids=request.drafter_prompt_ids if settings.models.has_drafter else (),
                num_draft_tokens=choice.num_draft_tokens,
                num_memory_tokens=settings.decode.num_memory_tokens,
            )

        drafted = Replay(
            self._target, self._vocabulary, costs, self._num_texts, snapshot.proposer, prepare, recent=host.recent
        )
        return self._replayed(drafted, str(choice))

    @property
    def _vocabulary(self) -> Any:
        return self._tokenizers.target.vocabulary

    def _replayed(self, replay: Replay, title: str) -> list[Counts]:
        with bar(title, len(self._texts)) as advance:
            return replay.run(self._texts, advance)


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
    """Return, for each tenant and kind of work, the fastest choice, its speed-up and the number of answers; plain
    decoding where none is faster."""
    numbers = defaultdict[tuple[str, str], list[int]](list)
    for number, text in enumerate(texts):
        numbers[text.request.tenant, text.work].append(number)
    best = {}
    for group, own in sorted(numbers.items()):
        plain_s = sum(plain[number].seconds for number in own)
        speedups = {name: plain_s / sum(each[number].seconds for number in own) for name, each in counts.items()}
        fastest = max({PLAIN: 1.0, **speedups}.items(), key=lambda each: each[1])
        best[group] = (*fastest, len(own))
    return best
