"""Proves in a child process that a grammar can be compiled: bounded in time, memory and stack, crashes and all.

The child starts with the first grammar, stays, and is started again when a grammar ended it.
"""

import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import omnidraft
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.vocab.tokenizer import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
WAIT_FACTOR = 20
"""Times the processor time: so long does a trial have on a busy machine."""
CHILD = "omnidraft.decode.sampling.grammar_child"


class TrialUnfinished(RequestError):
    """The trial ended from outside and says nothing about the grammar; the same one may be tried again."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """What one grammar may take."""

    processor_s: float = 1.0
    """Turned up, slower grammars compile, and those who ask for one wait longer for each other."""
    memory_bytes: int = 256 << 20
    """On top of the vocabulary; turned up, so may the worker's own memory grow for each grammar it keeps."""


class GrammarTrial:
    """Tries one grammar at a time, for any thread."""

    def __init__(self, vocabulary: Vocabulary, limits: TrialLimits | None = None) -> None:
        self._limits = limits or TrialLimits()
        tokens = [token.decode("latin-1") for token in vocabulary.token_bytes]
        bounds = {"processor_s": self._limits.processor_s, "memory_bytes": self._limits.memory_bytes}
        self._first_line = json.dumps({"tokens": tokens} | bounds).encode() + b"\n"
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, kind: str, text: str) -> None:
        """Return when the grammar compiles within the limits, and its first masks can be computed.

        Raises:
            RequestError: it does not; TrialUnfinished where it may, another time.
            OmnidraftError: no child can be started.
        """
        line = json.dumps({"kind": kind, "text": text}).encode() + b"\n"
        with self._lock:
            child = self._running()
            answer = _asked(child, line, self._limits.processor_s * WAIT_FACTOR)
            if answer is None:
                self._child = None
                self._kill_child.detach()
                code = _ended(child)
                refusal = TrialUnfinished if code == -signal.SIGKILL else RequestError
                raise refusal(f"{kind}: cannot be compiled: {self._said_of(code)}")
        if answer["refusal"] is not None:
            raise RequestError(answer["refusal"])

    def _running(self) -> "subprocess.Popen[bytes]":
        """Raises OmnidraftError."""
        if self._child is None or self._child.poll() is not None:
            child = _started()
            if _asked(child, self._first_line, START_TIMEOUT_S) is None:
                command = f"{sys.executable} -m {CHILD}"
                raise OmnidraftError(f"the process that tries grammars ended with {_ended(child)}; run {command}")
            self._kill_child = weakref.finalize(self, _kill, child)
            self._child = child
        return self._child

    def _said_of(self, code: int) -> str:
        """Return what an exit code means to whoever asked for the grammar."""
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        means = {
            "SIGPROF": f"it takes more than {self._limits.processor_s:g} s of processor time",
            "SIGABRT": f"it takes more than {self._limits.memory_bytes >> 20} MB of memory",
            "SIGSEGV": "it is nested or chained too deeply",
            "SIGKILL": f"it took more than {self._limits.processor_s * WAIT_FACTOR:g} s, or memory ran out",
        }
        return f"{means.get(name, 'the compiler crashed')} ({name}); ask for something simpler"


def _started() -> "subprocess.Popen[bytes]":
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(omnidraft.__path__[0]).parent), *sys.path[1:]])}
    return subprocess.Popen(
        [sys.executable, "-m", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,  # a Ctrl-C at the terminal is for the worker alone
    )


def _asked(child: "subprocess.Popen[bytes]", line: bytes, timeout_s: float) -> dict[str, Any] | None:
    """Return the child's answer; None when it ended, or gave none in time."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    answer = child.stdout.readline() if poll.poll(timeout_s * 1000) else b""
    return json.loads(answer) if answer else None


def _ended(child: "subprocess.Popen[bytes]") -> int:
    """Return the exit code, minus the signal's number; ends a child that does not end by itself."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(1.0)
    code = _kill(child)
    logger.warning("the process that tries grammars ended with %d; the next grammar starts another", code)
    return code


def _kill(child: "subprocess.Popen[bytes]") -> int:
    """Return the exit code; that of a child which has ended is its own. Closes its pipes."""
    with suppress(BrokenPipeError), child:  # what was written last may not have been read
        child.kill()
    return child.wait()
