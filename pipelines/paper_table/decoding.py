"""One loaded target that answers prompts in several ways, in turns; every answered prompt is a cell of its own."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from omnidraft import config, wiring
from omnidraft.decode.decoder import Decoder
from omnidraft.decode.policy.cost_model import MeasuredCosts
from omnidraft.errors import OmnidraftError
from omnidraft.ports import Proposer, Sampling, Step
from omnidraft.progress import bar
from omnidraft.prompts import Prompt
from omnidraft.wiring.named_snapshots import named_or_base
from pipelines.bench.methods import HUGGINGFACE, Setup, huggingface
from pipelines.bench.runs import WARM_UP_TEXT, WARM_UP_TOKENS, Failure, Method, attempt, rotated, run_of_steps
from pipelines.lib.prompt_requests import request_for
from pipelines.paper_table.result_cache import ResultCache

PLAIN = "plain"

Run = dict[str, Any]
"""The fields of one answer's report; `failure` where it failed."""
Way = Callable[[Prompt], Run]
"""Answers a prompt."""


class Decoding:
    """Loads a target. Raises as wiring when the models cannot be loaded."""

    def __init__(self, settings: config.Settings, max_new_tokens: int, temperature: float = 0.0) -> None:
        self._settings, self._max_new_tokens, self._temperature = settings, max_new_tokens, temperature
        self._tokenizers = wiring.vocabularies(settings)
        target = wiring.target(settings, self._tokenizers)
        self._costs = MeasuredCosts(target)
        self._costs.passes("fast")
        self._decoder = Decoder(target, self._tokenizers.target.vocabulary, costs=self._costs)

    def plain(self) -> Way:
        """Return the way without drafting."""
        return partial(self._answer, None, self._settings.decode.model_copy(update={"num_draft_tokens": 0}))

    def drafting(self, folder: Path | None, settings: config.Settings) -> Way:
        """Return the way that drafts as `settings` say, with a snapshot folder or the base drafter."""
        load = wiring.snapshot_loader(settings, self._tokenizers, self._costs)
        loaded = named_or_base(settings, load, None if folder is None else str(folder))
        return partial(self._answer, loaded.proposer, settings.decode)

    def _answer(self, proposer: Proposer | None, decode: config.DecodeSettings, prompt: Prompt) -> Run:
        request = request_for(prompt, self._tokenizers, self._max_new_tokens, decode.num_draft_tokens)
        request = replace(
            request, sampling=Sampling(self._temperature), seed=0, num_memory_tokens=decode.num_memory_tokens
        )
        drafted = Counter[str]()

        def counted(steps: Iterator[Step]) -> Iterator[Step]:
            for step in steps:
                drafted.update(str(source) for source in step.tree.sources[1:])
                yield step

        run = run_of_steps(counted(self._decoder.decode(request, proposer)))
        return run.plain_data() | {"drafted_by_source": dict(drafted)}


def huggingface_ways(settings: config.Settings, names: Sequence[str], max_new_tokens: int) -> dict[str, Way]:
    """Return transformers' own ways of these names; one that cannot run says why in every answer. Each has answered
    once, since a first answer takes longer: a target of ours has had its passes measured before it answers."""
    try:
        methods = huggingface(names, Setup(settings, temperature=0.0)) if names else {}
    except OmnidraftError as exc:
        failure = Failure(str(exc)).plain_data()
        return {name: lambda prompt: failure for name in names}
    for method in methods.values():
        attempt(method, Prompt(WARM_UP_TEXT), min(WARM_UP_TOKENS, max_new_tokens))
    return {name: partial(_attempted, method, max_new_tokens) for name, method in methods.items()}


def _attempted(method: Method, max_new_tokens: int, prompt: Prompt) -> Run:
    return attempt(method, prompt, max_new_tokens).plain_data()


def decode_all(
    cells: ResultCache,
    key: str,
    texts: Sequence[Prompt],
    load: Callable[[], Mapping[str, Way]],
    *,
    num_slow: int | None = None,
) -> None:
    """Answer every prompt in every way, unless its cell is there from an interrupted run.

    Args:
        load: loads the ways, when the first cell is missing.
        num_slow: prompts that transformers answers; None: all.
    """
    loaded = cache(load)
    with bar(f"{key}: prompts in all ways", len(texts)) as advance:
        for number, prompt in enumerate(texts):
            skipped = HUGGINGFACE if num_slow is not None and number >= num_slow else ()
            cells.get(f"{key}/{number}", partial(_answers, loaded, prompt, number, skipped))
            advance()


def _answers(
    load: Callable[[], Mapping[str, Way]], prompt: Prompt, number: int, skipped: Sequence[str]
) -> dict[str, Run]:
    """Return the answer of each way; which way comes first changes from prompt to prompt."""
    ways = load()
    return {name: ways[name](prompt) for name in rotated(list(ways), number) if name not in skipped}
