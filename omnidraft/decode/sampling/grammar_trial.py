"""Tries grammars in a child process: compilation is bounded in time, memory and stack, and may crash.

The child starts with the first grammar, stays, and is restarted when a grammar ended it.
"""

import logging
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import dataclass

from omnidraft.child import ask, kill, start_with_pipes
from omnidraft.errors import OmnidraftError, RequestError
from omnidraft.vocab.tokenizer import Vocabulary

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
GRACE_S = 1.0
"""A child that answers no more may take so long to end by itself, of which its exit code tells."""
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
        self._setup = {"tokens": tokens} | bounds
        self._child: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def check(self, kind: str, text: str) -> None:
        """Return when the grammar compiles within the limits, and its first masks can be computed.

        Raises:
            RequestError: it does not; TrialUnfinished where it may, another time.
            OmnidraftError: no child can be started.
        """
        with self._lock:
            child = self._running_child()
            reply = ask(child, {"kind": kind, "text": text}, self._limits.processor_s * WAIT_FACTOR)
            if reply is None:
                self._child = None
                self._kill_child.detach()
                code = kill(child, GRACE_S)
                logger.warning("the process that tries grammars ended with %d; the next grammar starts another", code)
                refusal = TrialUnfinished if code == -signal.SIGKILL else RequestError
                raise refusal(f"{kind}: cannot be compiled: {self._describe_exit(code)}")
        if reply["refusal"] is not None:
            raise RequestError(reply["refusal"])

    def _running_child(self) -> "subprocess.Popen[bytes]":
        """Return the child, started if needed. Raises OmnidraftError."""
        if self._child is None or self._child.poll() is not None:
            child = start_with_pipes(CHILD, log=subprocess.DEVNULL)
            if ask(child, self._setup, START_TIMEOUT_S) is None:
                code, command = kill(child, GRACE_S), f"{sys.executable} -m {CHILD}"
                raise OmnidraftError(f"the process that tries grammars ended with {code}; run {command}")
            self._kill_child = weakref.finalize(self, kill, child)
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
