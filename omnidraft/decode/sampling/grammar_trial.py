"""Tries grammars in a child process: compilation is bounded in time, memory and stack, and may crash.

The child starts with the first grammar, stays, and is restarted when a grammar ended it.
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
"""Wall time of a trial over its processor time, at most, on a busy machine."""
CHILD = "omnidraft.decode.sampling.grammar_child"


class TrialUnfinished(RequestError):
    """The trial was ended from outside and says nothing about the grammar; the same one may be tried again."""


@dataclass(frozen=True, slots=True)
class TrialLimits:
    """Resources that one grammar may use."""

    processor_s: float = 1.0
    """Turned up, slower grammars compile, and their clients wait longer for each other."""
    memory_bytes: int = 256 << 20
    """On top of the vocabulary; turned up, the worker's own memory may grow as much for each grammar it caches."""


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
            child = self._running_child()
            reply = _ask(child, line, self._limits.processor_s * WAIT_FACTOR)
            if reply is None:
                self._child = None
                self._kill_child.detach()
                code = _reap(child)
                refusal = TrialUnfinished if code == -signal.SIGKILL else RequestError
                raise refusal(f"{kind}: cannot be compiled: {self._describe_exit(code)}")
        if reply["refusal"] is not None:
            raise RequestError(reply["refusal"])

    def _running_child(self) -> "subprocess.Popen[bytes]":
        """Return the child, started if needed. Raises OmnidraftError."""
        if self._child is None or self._child.poll() is not None:
            child = _start_child()
            if _ask(child, self._first_line, START_TIMEOUT_S) is None:
                command = f"{sys.executable} -m {CHILD}"
                raise OmnidraftError(f"the process that tries grammars ended with {_reap(child)}; run {command}")
            self._kill_child = weakref.finalize(self, _kill, child)
            self._child = child
        return self._child

    def _describe_exit(self, code: int) -> str:
        """Return the meaning of an exit code for the client."""
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        meanings = {
            "SIGPROF": f"it takes more than {self._limits.processor_s:g} s of processor time",
            "SIGABRT": f"it takes more than {self._limits.memory_bytes >> 20} MB of memory",
            "SIGSEGV": "it is nested or chained too deeply",
            "SIGKILL": f"it took more than {self._limits.processor_s * WAIT_FACTOR:g} s, or memory ran out",
        }
        return f"{meanings.get(name, 'the compiler crashed')} ({name}); ask for something simpler"


def _start_child() -> "subprocess.Popen[bytes]":
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(omnidraft.__path__[0]).parent), *sys.path[1:]])}
    return subprocess.Popen(
        [sys.executable, "-m", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,  # a Ctrl-C at the terminal is for the worker alone
    )


def _ask(child: "subprocess.Popen[bytes]", line: bytes, timeout_s: float) -> dict[str, Any] | None:
    """Return the child's reply; None when it ended, or sent none in time."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line)
        child.stdin.flush()
    except BrokenPipeError:
        return None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    reply = child.stdout.readline() if poll.poll(timeout_s * 1000) else b""
    return json.loads(reply) if reply else None


def _reap(child: "subprocess.Popen[bytes]") -> int:
    """Return the exit code, minus the signal's number; kills a child that does not end by itself."""
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
