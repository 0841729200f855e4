"""Run the command line in a child process, so that a crash of native code ends with words and not in silence."""

import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from omnidraft.exit_status import describe_exit

_WATCHED = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SENT_BY_A_PROCESS = 0  # SI_USER; the terminal's own signals reach the child without our help
_PR_SET_PDEATHSIG = 1


def run_watched(command: Callable[[], None]) -> None:
    """Returns from `command` in the child; in the parent ends this process as the child ended.

    Signals that somebody sends to this process are passed on, and a child whose parent was killed is killed too.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        faulthandler.enable()
        command()
        return
    _end_like(_outlive(child))


def _outlive(child: int) -> int:
    """How it ended, as subprocess would say it."""
    while True:
        received = signal.sigwaitinfo(_WATCHED)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code == _SENT_BY_A_PROCESS:
                os.kill(child, received.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _end_like(returncode: int) -> None:
    if returncode >= 0:
        sys.exit(returncode)
    print(f"omnidraft: ended by {describe_exit(returncode)}", file=sys.stderr, flush=True)
    with suppress(OSError):  # SIGKILL takes no handler, and needs none
        signal.signal(-returncode, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    os.kill(os.getpid(), -returncode)
