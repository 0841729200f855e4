"""Descriptions of how a child process ended: the signal's name, and what to do about it."""

import signal

CRASHES = (signal.SIGILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP)
"""Signals that a process raises by its own fault."""
_ADVICE = {
    signal.SIGILL: "an instruction that this processor does not run: `omnidraft doctor` shows what works here",
    signal.SIGKILL: "killed from outside, most often because memory ran out: give it more, or take a smaller model",
    signal.SIGTERM: "somebody asked it to end",
}
_CRASH_ADVICE = "a crash in native code: run `omnidraft doctor`, and report the stack that stands above"


def describe_exit(returncode: int) -> str:
    """Describe how a process ended, with advice for signals.

    Args:
        returncode: that of subprocess: negative for a signal.
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        number = signal.Signals(-returncode)
    except ValueError:
        return f"signal {-returncode}"
    advice = _ADVICE.get(number, _CRASH_ADVICE if number in CRASHES else None)
    return f"{number.name} ({signal.strsignal(number)})" + (f"; {advice}" if advice else "")
