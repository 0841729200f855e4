"""Run the command line in a child process, so that a crash of native code ends with an explanation."""

import faulthandler
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from omnidraft.child import describe_exit, end_with_parent

_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SENT_BY_A_PROCESS = 0  # SI_USER; the terminal's own signals reach the child directly
_INTERRUPTED = 128 + signal.SIGINT  # as shells count and typer exits


def run_supervised(command: Callable[[], None]) -> None:
    """Run `command` in a child process and exit with the child's status. The function returns in the child only.

    Signals sent to this process are forwarded, and the child is killed when its parent is.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a launcher that ignored it would keep the child's end from us
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    child = os.fork()
    if child == 0:
        end_with_parent(signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        faulthandler.enable()
        command()
        return
    _exit_like(_wait(child))


def _wait(child: int) -> int:
    """Wait for the child, forwarding signals; return its return code in subprocess' convention."""
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code == _SENT_BY_A_PROCESS:
                os.kill(child, received.si_signo)
            continue
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)


def _exit_like(returncode: int) -> None:
    """End as the child did. An interrupt that passed through `exec` kills CPython even if it was caught: 130 too."""
    if returncode == -signal.SIGINT:
        sys.exit(_INTERRUPTED)
    if returncode >= 0:
        sys.exit(returncode)
    print(f"omnidraft: ended by {describe_exit(returncode)}", file=sys.stderr, flush=True)
    with suppress(OSError):  # SIGKILL takes no handler, and needs none
        signal.signal(-returncode, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    os.kill(os.getpid(), -returncode)
