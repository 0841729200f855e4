"""What command-line options name: names or numbers with commas between them, files, logs."""

from collections.abc import Collection, Iterable
from pathlib import Path

from omnidraft.errors import RequestError


def chosen(text: str, known: Collection[str] = (), kind: str = "", *, baseline: str | None = None) -> list[str]:
    """Return the names in `text`, each once, the baseline first. Raises RequestError when one is not among `known`, if
    there are any, or when the baseline is missing."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if known and (unknown := [name for name in names if name not in known]):
        raise RequestError(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    if baseline is not None and baseline not in names:
        raise RequestError(f"--{kind}s needs {baseline}: speed-ups are quoted against it")
    return sorted(names, key=lambda name: name != baseline)


def numbers(text: str, option: str, most: int | None = None) -> list[int]:
    """Return the numbers in `text`, each once. Raises RequestError, naming the option, unless all are from 1 on, to
    `most`, or when there are none."""
    names = chosen(text)
    known = [int(name) for name in names if name.isascii() and name.isdigit()]
    if not known or len(known) < len(names) or min(known) < 1 or (most is not None and max(known) > most):
        limits = "from 1 on" if most is None else f"from 1 to {most}"
        raise RequestError(f"{option} needs numbers {limits} with commas between them, got {text!r}")
    return known


def named_files(paths: Iterable[Path]) -> dict[str, Path]:
    """Return files by their names without the ending. Raises RequestError when two have the same."""
    files: dict[str, Path] = {}
    for path in paths:
        if path.stem in files:
            raise RequestError(f"two files are named {path.stem}, {files[path.stem]} and {path}; rename one")
        files[path.stem] = path
    return files


def archive_or_url(log: str | None) -> tuple[Path | None, str | None]:
    """Return the archive that --log names, else the log's URL; None: the log of the settings.

    Raises:
        RequestError: there is no such archive.
    """
    if log is None or "://" in log:
        return None, log
    if not Path(log).is_file():
        raise RequestError(f"there is no archive at {log}; a log is sqlite:///path or kafka://host:port")
    return Path(log), None
