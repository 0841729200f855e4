"""Refuses half of a surrogate pair, which JSON can carry and no tokenizer or codec can encode."""

from collections.abc import Iterable, Mapping

from omnidraft.errors import RequestError


def require_text(texts: Mapping[str, Iterable[str]]) -> None:
    """Raises RequestError with the name of what cannot be encoded."""
    for name, given in texts.items():
        for text in given:
            try:
                text.encode()
            except UnicodeEncodeError as exc:
                raise RequestError(f"{name}: character {exc.start} is half of a surrogate pair, not text") from exc
