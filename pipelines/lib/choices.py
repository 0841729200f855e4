"""Names in a command-line option, with commas between them."""

from collections.abc import Collection

from omnidraft.errors import RequestError


def chosen(text: str, known: Collection[str] = (), kind: str = "") -> list[str]:
    """Return the names in `text`, each once. Raises RequestError when one is not among `known`, if there are any."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if known and (unknown := [name for name in names if name not in known]):
        raise RequestError(f"no {kind} {unknown[0]!r}; there are {', '.join(known)}")
    return names
