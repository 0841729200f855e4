"""A service as a child process that does not outlive this one, however this one ends."""

import ctypes
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], log_path: Path, environ: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own; append its output to `log_path`. Call it from the main thread.

    The kernel sends it SIGTERM when the thread that started it is gone, so also after a crash of this process.
    """
    prctl = ctypes.CDLL(None).prctl

    def end_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
