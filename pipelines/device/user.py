"""One user of an LLM that learns: asks, pauses, ends the day, and comes back to what was learned.

Processor time is the whole process's, its threads together: what passes while a request runs is decoding's, since
learning waits then, and what passes in pauses and at the end of a day is learning's.
"""

import gc
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from omnidraft import wiring
from omnidraft.config import Settings
from omnidraft.device.learning import IdleLearning
from omnidraft.errors import SnapshotNotFound
from omnidraft.fleet.ratio import Ratio
from omnidraft.llm import LLM
from omnidraft.ports import SnapshotVersion
from omnidraft.prompts import Prompt
from omnidraft.sampling_params import SamplingParams

_SETTLING_S = 0.2
"""The quiet time after which learning begins here: the pauses are real, and the requests follow each other at once."""
_SHORT_PAUSE_S = 1.5
"""Every second pause ends after this time, so that requests come in the middle of steps, too."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The test prompts after so many requests."""

    num_requests: int
    tokens_per_pass: float
    tokens_per_pass_error: float | None
    """Its standard error over the prompts."""
    tokens_per_s: float
    cpu_s_per_token: float
    agreement: float
    """Of first candidates while it decodes, those of the memory of earlier answers too."""
    serving_version: int | None

    def plain_data(self) -> dict[str, Any]:
        return asdict(self)


class DeviceUser:
    """Has an LLM of these settings for as long as `live` runs."""

    def __init__(self, settings: Settings, home: Path, *, max_new_tokens: int, pause_every: int) -> None:
        self._given, self._home, self._pause_every = settings, home, pause_every
        self._max_new_tokens = max_new_tokens
        self.settings = wiring.device_settings(settings, home)
        """Those that the LLM works with."""
        self.snapshots: list[tuple[SnapshotVersion, Path]] = []
        """All that were published, each with a folder of its own."""
        self.answers: list[list[int]] = []
        """The target's answers to the test prompts, which no drafter changes."""
        self.costs: dict[str, Any] = {}
        self._decoding_cpu_s = self._learning_cpu_s = 0.0
        self._num_decoded = 0
        self._longest_overlap_s = self._longest_close_s = 0.0

    def live(
        self, asked: Sequence[Prompt], test: Sequence[Prompt], stages: Sequence[int], advance: Callable[[], None]
    ) -> Iterator[Stage]:
        """Ask all of `asked`; answer the test prompts before, and after each number of requests in `stages`. Yield each
        stage when it is measured; the costs of all days are known when there are no more."""
        llm = self._open()
        stage = self._measure(llm, 0, test, advance)
        self.costs["peak_gib_decoding"] = _peak_gib()  # the learner is loaded in the first pause
        yield stage
        for begin, end in zip((0, *stages), stages, strict=False):
            self._ask(llm, asked[begin:end], advance)
            self._end_day(llm)
            self.costs.setdefault("peak_gib_learning", _peak_gib())
            del llm
            gc.collect()
            llm = self._open()
            yield self._measure(llm, end, test, advance)
        self._sum_up(llm)
        llm.close()

    def _open(self) -> LLM:
        sections = {
            name: getattr(self._given, name).model_dump(exclude_unset=True) for name in type(self._given).model_fields
        }
        sections["learner"] |= {"idle_s": _SETTLING_S}
        return LLM(learn=True, home=self._home, **{name: each for name, each in sections.items() if each})

    def _measure(self, llm: LLM, num_requests: int, test: Sequence[Prompt], advance: Callable[[], None]) -> Stage:
        ratio, num_tokens, num_scored, num_agreed = Ratio(), 0, 0, 0
        started_s, cpu_s = time.perf_counter(), time.process_time()
        answers: list[list[int]] = []
        for prompt in test:
            output = llm.chat(prompt.text, self._params(store=False), use_tqdm=False)[0].outputs[0]
            ratio.add(output.stats.num_tokens, output.stats.num_passes)
            num_tokens += output.stats.num_tokens
            num_scored, num_agreed = num_scored + output.stats.num_scored, num_agreed + output.stats.num_agreed
            answers.append(output.token_ids)
            advance()
        self.answers = answers
        return Stage(
            num_requests,
            ratio.estimate,
            ratio.error if len(test) > 1 else None,
            num_tokens / (time.perf_counter() - started_s),
            (time.process_time() - cpu_s) / num_tokens,
            num_agreed / max(1, num_scored),
            _learning(llm).status().serving_version,
        )

    def _ask(self, llm: LLM, asked: Sequence[Prompt], advance: Callable[[], None]) -> None:
        for number, prompt in enumerate(asked, 1):
            cpu_s = time.process_time()
            (answer,) = llm.chat(prompt.text, self._params(), use_tqdm=False)
            self._decoding_cpu_s += time.process_time() - cpu_s
            self._num_decoded += answer.outputs[0].stats.num_tokens
            num_pauses, since = divmod(number, self._pause_every)
            if not since:
                self._learn(partial(_learning(llm).wait, None if num_pauses % 2 else _SHORT_PAUSE_S))
                self._keep_snapshots()
            advance()

    def _end_day(self, llm: LLM) -> None:
        self._learn(_learning(llm).wait)
        started_s = time.perf_counter()
        self._learn(llm.close)
        self._longest_close_s = max(self._longest_close_s, time.perf_counter() - started_s)
        self._longest_overlap_s = max(self._longest_overlap_s, _learning(llm).status().longest_overlap_s)
        self._keep_snapshots()

    def _learn(self, until: Callable[[], object]) -> None:
        cpu_s = time.process_time()
        until()
        self._learning_cpu_s += time.process_time() - cpu_s

    def _keep_snapshots(self) -> None:
        """Link what was published since, before the home deletes what it needs no more."""
        registry, known = wiring.registry(self.settings), {version.version for version, _ in self.snapshots}
        for version in registry.versions():
            if version.version not in known:
                fetch = partial(registry.fetch, version.version, self._home.with_name(f"{self._home.name}-snapshots"))
                try:
                    self.snapshots.append((version, fetch()))
                except SnapshotNotFound:  # more than registry.keep_resume in one pause
                    continue

    def _sum_up(self, llm: LLM) -> None:
        status = _learning(llm).status()
        self.costs |= {
            "tokens_decoded": self._num_decoded,
            "tokens_learned": status.num_tokens,
            "records_recorded": status.num_recorded,
            "records_learned": status.num_learned,
            "decoding_cpu_s_per_token": self._decoding_cpu_s / max(1, self._num_decoded),
            "learning_cpu_s_per_token": self._learning_cpu_s / max(1, status.num_tokens),
            "longest_overlap_s": self._longest_overlap_s,
            "longest_close_s": self._longest_close_s,
            "home_mib": sum(each.stat().st_size for each in self._home.rglob("*") if each.is_file()) / 2**20,
            "held_out_agreement": asdict(status.agreement),
        }

    def _params(self, *, store: bool = True) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self._max_new_tokens, store=store)


def _learning(llm: LLM) -> IdleLearning:
    assert llm.learning is not None
    return llm.learning


def _peak_gib() -> float:
    """Return the highest memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
