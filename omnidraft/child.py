"""A child process that may die: it has a session of its own, ends with its parent, answers lines of JSON, is stopped,
and its end is told as what died of what."""

import ctypes
import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], log_path: Path, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own; append its output to `log_path`. Call it from the main thread.

    The kernel sends it SIGTERM when the thread that started it is gone, so also after a crash of this process.
    """
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=dict(environ),
            start_new_session=True,
            preexec_fn=_end_with_parent(signal.SIGTERM),
        )


def start_with_pipes(
    module: str, *arguments: str, log: IO[bytes] | int, environ: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a module that `ask` talks to, from any thread; its standard error goes to `log`. It ends with its input."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=os.environ | import_path() | dict(environ or {}),
        start_new_session=True,  # a Ctrl-C at the terminal is for its parent alone
    )


def _end_with_parent(number: signal.Signals) -> Callable[[], object]:
    """Return what a child calls to get this signal from the kernel when the thread that started it is gone.

    A child of many threads may not load a library, so this is done before.
    """
    prctl = ctypes.CDLL(None).prctl
    return lambda: prctl(_PR_SET_PDEATHSIG, number)


def import_path() -> dict[str, str]:
    """Return the variable by which a child imports what this process imports."""
    return {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])}


def ask(
    child: subprocess.Popen[bytes], message: Mapping[str, Any] | None = None, timeout_s: float | None = None
) -> dict[str, Any] | None:
    """Return the child's next line, after a message if there is one; None when it ended, or wrote none in time."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if message is not None:
            child.stdin.write(json.dumps(message).encode() + b"\n")
            child.stdin.flush()
    except BrokenPipeError:
        return None
    poll = select.poll()
    poll.register(child.stdout, select.POLLIN)
    line = child.stdout.readline() if poll.poll(None if timeout_s is None else timeout_s * 1000) else b""
    return json.loads(line) if line else None


def kill(child: subprocess.Popen[bytes], grace_s: float = 0.0) -> int:
    """Kill a child that does not end by itself so soon, close its pipes, and return its exit code."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)
    with suppress(BrokenPipeError), child:  # what was written last may not have been read
        child.kill()
    return child.wait()


def stop(*children: subprocess.Popen[bytes], grace_s: float) -> None:
    """Ask all to end, then kill what did not, and the processes that they leave behind in their sessions."""
    for child in children:
        child.terminate()
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
"""Signals that a process raises by its own fault."""
_ADVICE: Mapping[int, str] = {
    signal.SIGILL: "an instruction that this processor does not run: `omnidraft doctor` shows what works here",
    signal.SIGKILL: "killed from outside, most often because memory ran out: give it more, or take a smaller model",
    signal.SIGTERM: "somebody asked it to end",
}
_CRASH_ADVICE = "a crash in native code: run `omnidraft doctor`, and report the stack that stands above"


def exit_name(returncode: int) -> str:
    """Return what a process ended by.

    Args:
        returncode: that of subprocess: negative for a signal.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"{signal.Signals(-returncode).name} ({signal.strsignal(-returncode)})"
    except ValueError:
        return f"signal {-returncode}"


def describe_exit(returncode: int) -> str:
    """Return what a process ended by, with advice for signals."""
    advice = _ADVICE.get(-returncode, _CRASH_ADVICE if -returncode in CRASHES else None)
    return exit_name(returncode) + (f"; {advice}" if advice else "")


def last_lines(log_path: Path, num_lines: int = 1) -> str:
    """Return the end of a log, and the source line at which a fatal signal struck."""
    log = log_path.read_text(errors="replace").strip().splitlines()
    fatal = next((at for at, line in enumerate(log) if line.startswith("Fatal Python error")), len(log))
    last = "\n".join(log[max(fatal - num_lines, 0) : fatal]) or "its log is empty"
    where = next((line.strip() for line in log[fatal:] if line.startswith("  File ")), None)
    return f"{last}; it was at {where}" if where else last


_SIGNALS = (
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SENT_BY_A_PROCESS = 0  # SI_USER; the terminal's own signals reach a child of the same session directly
_INTERRUPTED = 128 + signal.SIGINT  # as shells count and typer exits


def run_supervised(command: Callable[[], None]) -> None:
    """Run `command` in a child process and exit with the child's status. The function returns in the child only.

    Signals sent to this process are forwarded, and the child is killed when its parent is.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a launcher that ignored it would keep the child's end from us
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    end_with_parent = _end_with_parent(signal.SIGKILL)
    child = os.fork()
    if child == 0:
        end_with_parent()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        faulthandler.enable()
        command()
        return
    _exit_like(_forward_signals(child))


def _forward_signals(child: int) -> int:
    """Wait for the child, forwarding signals; return its return code in subprocess' convention."""
    while True:
        received = signal.sigwaitinfo(_SIGNALS)
        if received.si_signo != signal.SIGCHLD:
            if received.si_code == _SENT_BY_A_PROCESS or os.getsid(child) != os.getsid(0):
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
