"""The child process that tries grammars, so that one which crashes the compiler ends this process and no other.

It reads and writes one line of JSON at a time: first the vocabulary and the limits, then one grammar after another.
Each is compiled in a thread with a small stack, with a limit on processor time and on memory, both of which end the
process by a signal. Imports nothing heavy. Ends with its parent, at the latest when the current grammar does.
"""

import json
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from omnidraft.decode.sampling.grammar_compiler import GrammarCompiler
from omnidraft.errors import RequestError
from omnidraft.vocab.tokenizer import Vocabulary

STACK_BYTES = 1 << 20
"""An eighth of the stack of the worker's threads: a grammar that fits here fits there."""
PARENT_CHECK_S = 0.2
NICENESS = 10
"""Decoding has priority."""


def main() -> None:
    """Serve until stdin ends."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(NICENESS)
    parent = os.getppid()
    setup = json.loads(sys.stdin.readline())
    vocabulary = Vocabulary(tuple(token.encode("latin-1") for token in setup["tokens"]), {}, frozenset())
    compiler = GrammarCompiler(vocabulary)
    _reply({"is_ready": True})
    threading.stack_size(STACK_BYTES)
    for line in sys.stdin:
        _limit_memory(setup["memory_bytes"])
        signal.setitimer(signal.ITIMER_PROF, setup["processor_s"])
        _reply(_try_compile(compiler, json.loads(line), len(vocabulary), parent))
        signal.setitimer(signal.ITIMER_PROF, 0)


def _try_compile(compiler: GrammarCompiler, grammar: dict[str, Any], vocab_size: int, parent: int) -> dict[str, Any]:
    """Return the refusal of a grammar, or None where it compiles."""
    replies: list[dict[str, Any]] = []

    def run() -> None:
        try:
            compiler.try_out(grammar["kind"], grammar["text"], vocab_size)
        except RequestError as exc:
            replies.append({"refusal": str(exc)})
        else:
            replies.append({"refusal": None})

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        thread.join(PARENT_CHECK_S)
        if os.getppid() != parent:
            os._exit(1)
    return replies[0]


def _limit_memory(num_bytes: int) -> None:
    """Allow `num_bytes` more than is mapped now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes, resource.RLIM_INFINITY))


def _reply(reply: dict[str, Any]) -> None:
    print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
