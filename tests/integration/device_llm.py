"""An LLM of tiny models that learns in a folder.

`python -m tests.integration.device_llm HOME TARGET DRAFTER` are two processes that die by SIGKILL, one after the other,
in the middle of a learning step and between a snapshot and its promotion. With `at-the-gate` behind it both die in a
request for which a step waits.
"""

import os
import signal
import sys
import time
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

from omnidraft import LLM, SamplingParams
from omnidraft.bus.sqlite_log import SqliteReader
from omnidraft.distill.ingest import poison_detector
from omnidraft.fleet.judge import Judge
from omnidraft.models.hf.trainable_drafter import TransformersTrainable

PARAMS = SamplingParams(temperature=0, max_tokens=10)
LEARNER: dict[str, Any] = {
    "records_per_step": 2,
    "steps_per_snapshot": 2,
    "held_out_every": 3,
    "lora_rank": 4,
}
DECODE: dict[str, Any] = {
    "mode": "reproducible",
    "policy": "fixed",
    "num_draft_tokens": 5,
    "threads": 1,
}
TOPIC = "omnidraft.traces.v1"
NUM_ASKED = 16
"""The number of questions that each of the two answers."""


def open_llm(home: Path | None, models: tuple[Path, Path], **learner: Any) -> LLM:
    """Return it; without a home it does not learn."""
    sections = {
        "decode": DECODE,
        "learner": LEARNER | learner,
        "models": {"drafter_precision": "float32"},
        "controller": {"tolerance": 1.0, "speed_tolerance": 1.0},  # promotes whatever was measured
    }
    target, drafter = map(str, models)
    return LLM(target, drafter, learn=home is not None, home=home, quantize="float32", **sections)


def ask(llm: LLM, num: int, first: int = 0) -> list[str]:
    """Ask so many questions, all of them different; return the answers."""
    questions = [f"How many clips are {number}?" for number in range(first, first + num)]
    return [each.outputs[0].text for each in llm.generate(questions, PARAMS, use_tqdm=False)]


def num_recorded(home: Path) -> int:
    """Return the number of records that the log of a home ever had."""
    with closing(SqliteReader(home / "log.db", TOPIC)) as reader:
        return sum(reader.end_offsets().values())


def die_in_step(number: int) -> None:
    """Let the learner die in the backward pass of this step."""
    hidden, seen = TransformersTrainable.hidden, []

    def lethal(self: Any, texts: Any) -> Any:
        output = hidden(self, texts)
        if output.requires_grad:
            seen.append(texts)
            if len(seen) == number:
                output.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return output

    TransformersTrainable.hidden = lethal  # type: ignore[method-assign]


def die_before_promotion(modules: Path) -> None:
    """Let the controller die when it first has a challenger to judge; note before what the process has imported."""
    decide = Judge._decide

    def lethal(self: Any, challenger: Any, champion: Any) -> Any:
        if champion is None:
            return decide(self, challenger, champion)
        modules.write_text("\n".join(sys.modules))
        os.kill(os.getpid(), signal.SIGKILL)

    Judge._decide = lethal  # type: ignore[method-assign]


def die_at_the_gate(home: Path, models: tuple[Path, Path]) -> None:
    """Let two children die, one over what the other left, each in a request that came in the middle of a step."""
    for _ in range(2):
        child = os.fork()
        if not child:
            die_in_request(home, models)
        require_killed(child)


def die_in_request(home: Path, models: tuple[Path, Path]) -> None:
    """Ask, unless somebody did; die in a request, once the first step waits for it and the journal is written."""
    hidden, in_step, is_asked = TransformersTrainable.hidden, Event(), Event()

    def interrupted(self: Any, texts: Any) -> Any:
        output = hidden(self, texts)
        if output.requires_grad:
            in_step.set()
            is_asked.wait()
        return output

    TransformersTrainable.hidden = interrupted  # type: ignore[method-assign]
    poison_detector.TRIES = 1
    llm = open_llm(home, models)
    assert llm.learning is not None
    if not num_recorded(home):
        with llm.learning.request():
            ask(llm, NUM_ASKED)
            while num_recorded(home) < NUM_ASKED:
                time.sleep(0.01)
    if not in_step.wait(60.0):
        sys.exit("no step began")
    with llm.learning.request():
        is_asked.set()
        deadline_s = time.monotonic() + 5.0
        while any(home.glob("trying-*.json")) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def require_killed(child: int) -> None:
    """Wait for a child, which has to die by SIGKILL."""
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"the child outlived its step: status {status}")


def main(home: Path, models: tuple[Path, Path]) -> None:
    """Let a child die in a step; then, over what it left, die before a promotion. Imports are paid once."""
    child = os.fork()
    if child:
        require_killed(child)
        die_before_promotion(home / "modules.txt")
    else:
        die_in_step(2)
    llm = open_llm(home, models)
    assert llm.learning is not None
    first = num_recorded(home)
    with llm.learning.request():
        ask(llm, NUM_ASKED, first)
        while num_recorded(home) < first + NUM_ASKED:
            time.sleep(0.01)
    llm.learning.wait()
    sys.exit("it outlived that")


if __name__ == "__main__":
    run = die_at_the_gate if sys.argv[4:] == ["at-the-gate"] else main
    run(Path(sys.argv[1]), (Path(sys.argv[2]), Path(sys.argv[3])))
