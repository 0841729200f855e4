"""What rounds cost on this machine, measured while it decodes: a step of the drafter takes longer between passes of the
target, whose weights empty the caches, than after another step."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import numpy as np

from omnidraft import assembly, prompts
from omnidraft.assembly.drafting import costs_about, costs_path, drafter_of
from omnidraft.assembly.host import DecodingHost
from omnidraft.assembly.snapshot_loading import named_or_base
from omnidraft.config import Settings
from omnidraft.decode.generation import GenerationRequest
from omnidraft.files import save_json
from omnidraft.models.loading import SharedDrafter
from omnidraft.models.native.drafter import AUTOMATIC_LEARNED, NativeDrafter
from omnidraft.ports import Step
from omnidraft.progress import bar
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.whatif.known_costs import BASE, LEARNED, MachineCosts, SecondsByRows, read_costs

_LENGTHS = (0, 1, 3, 7, 15, 31)
_NUM_PROMPTS, _NUM_TOKENS = 4, 24
_PASS_ROWS, _STEP_ROWS = (1, 2, 4, 8, 16, 32), (1, 2, 4, 16, 64)
_REFITS = 8
_Rounds = Sequence[tuple[Sequence[int], float]]
"""What each round had, and its seconds."""


def this_machine(settings: Settings, *, has_learned: bool) -> MachineCosts:
    """Return what the pair's rounds cost here, as measured before or now, with those of a learned drafter where
    `has_learned`. Raises ModelError."""
    path = costs_path("rounds", settings.models.model_dump(), settings.decode.mode)
    kept = read_costs(path) if path.exists() else None
    if kept is None or (has_learned and LEARNED not in kept.steps):
        for costs in measured(settings, kept, has_learned=has_learned):
            save_json(asdict(costs), path)
    return read_costs(path)


def measured(
    settings: Settings, kept: MachineCosts | None = None, *, has_learned: bool = True
) -> Iterator[MachineCosts]:
    """Yield what the pair's rounds cost here, from decoding built-in prompts alone with drafts of several lengths, and
    again with what a learned drafter's steps cost, if that has another precision; half a minute or more for each.
    Raises ModelError.

    Args:
        kept: the costs with the base drafter, where they were measured before.
    """
    decode = settings.decode.model_copy(update={"policy": "fixed", "suffix_memory": False, "lookup": False})
    settings = settings.model_copy(update={"decode": decode})
    tokenizers = assembly.vocabularies(settings)
    host = DecodingHost(settings, CountingMetrics(), tokenizers)
    if kept is None:
        steps = _decoded(host, BASE)
        kept = MachineCosts(
            costs_about(settings, host.target),
            seconds_by_rows([((len(step.tree),), step.timings.target_s) for step in steps], _PASS_ROWS),
            {BASE: _step_costs(steps)},
            seconds_by_rows([((len(step.tree),), step.timings.other_s) for step in steps], _PASS_ROWS),
        )
        yield kept
    if not has_learned:
        return
    learned = kept.steps[BASE]
    model = drafter_of(named_or_base(settings, host.load, None).proposer).model
    if settings.models.drafter_precision == "auto" and isinstance(model, NativeDrafter):
        from omnidraft.models.hf.drafter import load_drafter  # takes seconds

        folder, kernels = tokenizers.drafter_folder, settings.models.kernels
        base = SharedDrafter(lambda: load_drafter(folder, AUTOMATIC_LEARNED, None, "full", kernels))
        other = DecodingHost(settings, CountingMetrics(), tokenizers, loaded_target=host.target, base=base)
        learned = _step_costs(_decoded(other, LEARNED))
    yield replace(kept, steps={**kept.steps, LEARNED: learned})


def _step_costs(steps: Sequence[Step]) -> SecondsByRows:
    drafted = [(each.tree.step_rows, each.timings.draft_s) for each in steps if any(each.tree.step_rows)]
    return seconds_by_rows(drafted, _STEP_ROWS)


def _decoded(host: DecodingHost, kind: str) -> list[Step]:
    texts = [each.text for each in prompts.built_in()]
    asked = [*texts[:_NUM_PROMPTS], *("\n".join(texts[:num]) for num in (4, len(texts)))]
    engine, steps = host.engine(named_or_base(host.settings, host.load, None)), list[Step]()
    with bar(f"measuring rounds of the {kind} drafter", len(_LENGTHS) * len(asked)) as advance:
        for text in asked:
            for length in _LENGTHS:
                request = GenerationRequest(
                    f"{length}. {text}",  # so that no earlier text has read it
                    max_new_tokens=_NUM_TOKENS,
                    ignores_eos=True,
                    num_draft_tokens=length,
                    is_stored=False,
                )
                steps += engine.stream(request).steps
                advance()
    return steps


def seconds_by_rows(rounds: _Rounds, knots: Sequence[int]) -> SecondsByRows:
    """Return the seconds of a pass, or a step, over so many rows, with straight lines between them: those that come
    nearest to what each round's took together."""
    largest = max(max(rows) for rows, _ in rounds)
    chosen = [each for each in knots if each < largest] + [largest]
    shares = [
        np.sum([[np.interp(each, chosen, unit) for unit in np.eye(len(chosen))] for each in rows if each], axis=0)
        for rows, _ in rounds
    ]
    seconds = np.maximum.accumulate(_nearest(np.array(shares), rounds))
    return dict(zip(chosen, seconds.tolist(), strict=True))


def _nearest(shares: np.ndarray, rounds: _Rounds) -> np.ndarray:
    """Return what each share takes on average: the least squares of what is missed beside what is expected, where no
    hiccup of the machine counts for more than three times that."""
    seconds = np.array([each for _, each in rounds])
    expected = np.full(len(seconds), seconds.mean())
    for _ in range(_REFITS):
        usual = np.minimum(seconds, 3 * expected) / expected
        fitted = np.maximum(np.linalg.lstsq(shares / expected[:, None], usual)[0], 0.0)
        expected = np.maximum(shares @ fitted, seconds.mean() / 100)
    return fitted
