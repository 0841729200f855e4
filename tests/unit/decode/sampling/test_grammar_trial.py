"""The child that tries grammars: a crash is a refusal with its reason, and the child ends with its parent."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from omnidraft.decode.sampling.grammar import Grammars
from omnidraft.decode.sampling.grammar_trial import GrammarTrial, TrialLimits, TrialUnfinished
from omnidraft.errors import RequestError
from omnidraft.ports import Grammar
from omnidraft.testing.toy_models import ToyTokenizer

VOCABULARY = ToyTokenizer([b"", b"", *(bytes([byte]) for byte in range(32, 127))], {"unk": 0, "eos": 1}).vocabulary
PATIENCE_S = 20.0


def chained(num: int) -> str:
    links: dict[str, object] = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(num)}
    return json.dumps({"$defs": links | {f"a{num}": {"type": "integer"}}, "$ref": "#/$defs/a0"})


SLOW = json.dumps({"patternProperties": {f"^a{i}[a-z]*$": {"type": "integer"} for i in range(300)}})


def children() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "omnidraft.decode.sampling.grammar_child" in each.cmdline()]


@pytest.fixture
def trial() -> GrammarTrial:
    return GrammarTrial(VOCABULARY, TrialLimits(processor_s=0.3))


def test_what_ends_the_child_is_refused_by_name_and_the_next_grammar_is_tried(trial: GrammarTrial) -> None:
    for text, message in ((chained(450), r"too deeply \(SIGSEGV\)"), (SLOW, r"0.3 s of processor time \(SIGPROF\)")):
        with pytest.raises(RequestError, match="json_schema: cannot be compiled: .*" + message):
            trial.check("json_schema", text)
        trial.check("json_schema", chained(50))


def test_a_child_whose_memory_is_too_small_says_so() -> None:
    trial = GrammarTrial(VOCABULARY, TrialLimits(memory_bytes=9 << 20))  # a thread's stack takes most of it
    with pytest.raises(RequestError, match=r"more than 9 MB of memory \(SIGABRT\)"):
        trial.check("regex", "|".join(f"w{i}x{i * 7919}" for i in range(4000)))


def test_one_child_is_started_with_the_first_grammar_stays_and_ends_with_its_owner() -> None:
    trial = GrammarTrial(VOCABULARY)
    before = children()
    trial.check("regex", "a+")
    [child] = set(children()) - set(before)
    trial.check("regex", "b+")
    assert set(children()) - set(before) == {child}
    del trial
    assert not child.is_running()


def test_a_killed_child_says_nothing_about_the_grammar() -> None:
    trial = GrammarTrial(VOCABULARY, TrialLimits(processor_s=10.0))
    grammars = Grammars(VOCABULARY, trial)
    before = set(children())
    trial.check("regex", "a+")
    [child] = set(children()) - before
    os.kill(child.pid, signal.SIGSTOP)
    killer = subprocess.Popen([sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({child.pid}, 9)"])
    with pytest.raises(TrialUnfinished, match="SIGKILL"):
        grammars.compile(Grammar("regex", "c+"))
    killer.wait()
    assert grammars.compile(Grammar("regex", "c+")).compiled is not None


def test_it_dies_with_its_parent() -> None:
    """Killed, so that nothing can be tidied up, while a slow grammar is under way."""
    code = f"""
import threading, time
from omnidraft.decode.sampling.grammar_trial import GrammarTrial, TrialLimits
from omnidraft.vocab.tokenizer import Vocabulary
trial = GrammarTrial(Vocabulary((b"", b"a", b"{{"), {{}}, frozenset()), TrialLimits(processor_s=60.0))
trial.check("regex", "a")
print(trial._child.pid, flush=True)
trial.check("json_schema", {SLOW!r})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    time.sleep(0.3)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + PATIENCE_S
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_grammar_is_tried_and_compiled_once(trial: GrammarTrial) -> None:
    class Counting(GrammarTrial):
        num = 0

        def check(self, kind: str, text: str) -> None:
            Counting.num += 1
            super().check(kind, text)

    grammars = Grammars(VOCABULARY, Counting(VOCABULARY))
    first = grammars.compile(Grammar("regex", "a+"))
    assert grammars.compile(Grammar("regex", "a+")).compiled is first.compiled
    for _ in range(2):
        with pytest.raises(RequestError, match="unclosed group"):
            grammars.compile(Grammar("regex", "("))
    grammars.matcher(first, frozenset({1}))
    assert Counting.num == 2
