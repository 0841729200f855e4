"""Which of the kernels that work is taken, by the times of their trials."""

from pathlib import Path

import pytest

from omnidraft.models.probe import choice
from omnidraft.models.probe.choice import Kernels, _fastest
from omnidraft.models.probe.subprocess_trial import Outcome

BOTH = ["amx", "avx2"]


def kernels(variant: str, **seconds_per_token: float) -> Kernels:
    return Kernels(variant, Path(variant), seconds_per_token)


@pytest.mark.parametrize(
    ("amx", "avx2", "chosen"),
    [
        ({"packed16": 7.1, "bfloat16": 13.3}, {"packed16": 10.1, "bfloat16": 10.2}, "amx"),
        ({"packed16": 46.0, "bfloat16": 76.5}, {"packed16": 22.0, "bfloat16": 39.6}, "amx"),  # beside other load
        ({"packed16": 30.0, "bfloat16": 12.0}, {"packed16": 10.0, "bfloat16": 12.0}, "avx2"),
        ({"packed16": 10.5}, {"packed16": 10.0}, "amx"),
        ({"packed16": 15.0}, {"packed16": 10.0}, "avx2"),
    ],
)
def test_the_fastest_is_taken_even_when_one_trial_met_other_load(
    amx: dict[str, float], avx2: dict[str, float], chosen: str
) -> None:
    found = {"amx": kernels("amx", **amx), "avx2": kernels("avx2", **avx2)}
    assert _fastest(found).variant == chosen


@pytest.mark.parametrize(
    ("first", "second", "tried", "chosen"),
    [
        (Outcome({"packed16": 7.0, "bfloat16": 13.0}), Outcome(), ["amx"], "amx"),
        (Outcome({"packed16": 30.0, "bfloat16": 12.0}), Outcome({"packed16": 10.0, "bfloat16": 12.0}), BOTH, "avx2"),
        (Outcome({"packed16": 7.0}), Outcome({"packed16": 10.0}), BOTH, "amx"),
        (Outcome(died_of="SIGILL"), Outcome({"packed16": 10.0, "bfloat16": 12.0}), BOTH, "avx2"),
    ],
    ids=["faster than torch", "slower than torch", "torch has no 16 bits", "dies"],
)
def test_narrower_instructions_are_tried_when_the_widest_are_no_gain(
    first: Outcome,
    second: Outcome,
    tried: list[str],
    chosen: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outcomes, names = {"amx": first, "avx2": second}, []

    def outcome_of(home: Path, name: str, library: Path, formats: tuple[str, ...]) -> Outcome:
        names.append(name)
        return outcomes[name]

    monkeypatch.setattr(choice, "_candidates", lambda variant: list(outcomes))
    monkeypatch.setattr(choice, "kernel_library", lambda name, folder: folder / name)
    monkeypatch.setattr(choice, "_try_kernels", outcome_of)
    found = choice._kernels(tmp_path, "auto", ("bfloat16",), "no compiler runs here")
    assert (names, found.variant) == (tried, chosen)
