"""Which of the kernels that work is taken, by the times of their trials."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from omnidraft.errors import KernelsUnavailable, ModelError
from omnidraft.models.probe import choice
from omnidraft.models.probe.choice import Kernels
from omnidraft.models.probe.subprocess_trial import Outcome

BOTH = ["amx", "avx2"]
SOUND = Outcome({"packed16": 10.0, "bfloat16": 12.0})
KILLED = ModelError("our kernels could not be tried here, SIGKILL")
Choose = Callable[..., Kernels]


@pytest.fixture
def names() -> list[str]:
    """The variants that were tried."""
    return []


@pytest.fixture
def choose(names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Chooses among variants whose trials end like this; some cannot be opened in this process."""

    def chosen(outcomes: Mapping[str, Outcome | ModelError], closed: Sequence[str] = ()) -> Kernels:
        def run_once(command: Sequence[str], *, name: str, **facts: Any) -> Outcome:
            if not name.startswith("our kernels for "):
                return Outcome({"float32": 20.0, "bfloat16": 12.0})
            names.append(name.split()[-1])
            outcome = outcomes[names[-1]]
            if isinstance(outcome, ModelError):
                raise outcome
            return outcome

        def opened(library: Path) -> None:
            if library.name in closed:
                raise KernelsUnavailable("the system refuses its instructions")

        monkeypatch.setattr(choice, "_candidates", lambda variant: list(outcomes))
        monkeypatch.setattr(choice, "kernel_library", lambda name, folder: folder / name)
        monkeypatch.setattr(choice, "run_once", run_once)
        monkeypatch.setattr(choice, "open_library", opened)
        monkeypatch.setenv("OMNIDRAFT_HOME", str(tmp_path))
        return choice.kernels()

    return chosen


@pytest.mark.parametrize(
    ("first", "second", "tried", "chosen"),
    [
        (Outcome({"packed16": 7.0, "bfloat16": 13.0}), Outcome(), ["amx"], "amx"),
        (Outcome({"packed16": 30.0, "bfloat16": 12.0}), Outcome({"packed16": 10.0, "bfloat16": 12.0}), BOTH, "avx2"),
        (Outcome({"packed16": 10.5}), Outcome({"packed16": 10.0}), BOTH, "amx"),
        (Outcome({"packed16": 15.0}), Outcome({"packed16": 10.0}), BOTH, "avx2"),
        (Outcome(died_of="SIGILL"), Outcome({"packed16": 10.0, "bfloat16": 12.0}), BOTH, "avx2"),
    ],
    ids=["faster than torch", "slower than torch", "hardly slower", "much slower", "dies"],
)
def test_narrower_instructions_are_tried_when_the_widest_are_no_gain(
    first: Outcome, second: Outcome, tried: list[str], chosen: str, choose: Choose, names: list[str]
) -> None:
    found = choose({"amx": first, "avx2": second})
    assert (names, found.variant) == (tried, chosen)


def test_narrower_instructions_take_over_where_the_widest_cannot_be_tried(choose: Choose) -> None:
    found = choose({"amx": KILLED, "avx2": SOUND})
    assert (found.variant, found.refused) == ("avx2", (("amx", str(KILLED)),))


def test_narrower_instructions_take_over_where_this_process_may_not_use_the_widest_and_those_are_not_tried(
    choose: Choose, names: list[str]
) -> None:
    found = choose({"amx": SOUND, "avx2": SOUND}, closed=["amx"])
    assert names == ["avx2"]
    assert (found.variant, found.refused) == ("avx2", (("amx", "the system refuses its instructions"),))


def test_kernels_that_cannot_be_tried_are_unavailable_and_not_tried_again(choose: Choose, names: list[str]) -> None:
    """A trial may take its whole time limit, and each model of a process asks for kernels."""
    for _ in range(2):
        with pytest.raises(KernelsUnavailable, match=r"work here: compiled for amx: .*SIGKILL, compiled for avx2: "):
            choose({"amx": KILLED, "avx2": KILLED})
    assert names == BOTH


@pytest.fixture
def some_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variant is compiled, and this process may open it."""
    monkeypatch.setattr(choice, "kernel_library", lambda name, folder: tmp_path / "some.so")
    monkeypatch.setattr(choice, "open_library", lambda library: None)


@pytest.mark.usefixtures("some_library")
def test_trials_compute_on_as_many_threads_as_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_once` has the variables in the key of an outcome."""
    environs: list[Mapping[str, str]] = []

    def run_once(command: Sequence[str], *, environ: Mapping[str, str], **facts: Any) -> Outcome:
        environs.append(environ)
        return SOUND

    monkeypatch.setattr(choice, "run_once", run_once)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        choice._try_torch(tmp_path, "AVX2")
        choice._usable(tmp_path, "avx2", ())
    finally:
        torch.set_num_threads(threads)
    assert environs == [{"OMP_NUM_THREADS": "3", choice.ISA_VARIABLE: "AVX2"}, {"OMP_NUM_THREADS": "3"}]


@pytest.fixture
def num_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts trials, none of which can run."""
    trials, program = tmp_path / "trials", tmp_path / "python"
    program.write_text(f"#!/bin/sh\necho one >> '{trials}'\nexit 3\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    return lambda: len(trials.read_text().split())


@pytest.mark.usefixtures("some_library")
def test_kernels_that_could_not_be_tried_are_tried_again_after_an_hour(
    num_trials: Callable[[], int], tmp_path: Path
) -> None:
    def start() -> int:
        with pytest.raises(ModelError, match=r"could not be tried here, exit code 3: .*60 minutes.*probes is deleted"):
            choice._usable(tmp_path, "avx2", ())
        return num_trials()

    assert (start(), start()) == (1, 1)
    (outcome,) = (tmp_path / "probes").glob("*.json")
    os.utime(outcome, (0, 0))
    assert (start(), start()) == (2, 2)


def test_torchs_products_that_could_not_be_tried_are_tried_at_every_start(
    num_trials: Callable[[], int], tmp_path: Path
) -> None:
    """Without an outcome nothing can start."""
    for _ in range(2):
        with pytest.raises(ModelError, match=r"could not be tried here, exit code 3: $"):
            choice._try_torch(tmp_path, None)
    assert num_trials() == 2
