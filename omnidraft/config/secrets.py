"""Secrets in settings: masking of credentials in URLs, checks of keys, and fields that hold secrets."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

KEY_BYTES = 32
HIDDEN = "***"


def masked(text: str) -> str:
    """Return the text with user, password and secret parameters of every URL in it masked."""
    without_user = re.sub(r"//[^/\s'\"]*@", f"//{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:password|token|secret)[^=&\s]*=)[^&\s'\"]+", rf"\1{HIDDEN}", without_user)


def require_key(name: str, key: SecretStr) -> None:
    """Raises ValueError, which does not show the key, unless it has the format of `omnidraft traces new-key`."""
    try:
        num_bytes = len(base64.b64decode(key.get_secret_value(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        num_bytes = 0
    if num_bytes != KEY_BYTES:
        raise ValueError(f"{name} must be {KEY_BYTES} bytes in URL-safe base64; `omnidraft traces new-key` makes one")


def holds_secret(model: type[BaseModel], path: Sequence[int | str]) -> bool:
    """Return whether the field at this path, or any below it, is a secret. The path may lead through list items, and
    continue beyond a field."""
    if path and isinstance(path[0], int):
        return holds_secret(model, path[1:])
    if not path:
        return any(holds_secret(model, (name,)) for name in model.model_fields)
    field = model.model_fields.get(str(path[0]))
    if field is None:
        return False
    types = list(_types(field.annotation))
    return SecretStr in types or any(holds_secret(type_, path[1:]) for type_ in types if _is_section(type_))


def _types(annotation: Any) -> Sequence[Any]:
    """Return the types in an annotation such as `tuple[SecretStr, ...]` or `SecretStr | None`."""
    inner = get_args(annotation)
    return [type_ for each in inner for type_ in _types(each)] if inner else [annotation]


def _is_section(type_: Any) -> bool:
    return isinstance(type_, type) and issubclass(type_, BaseModel)
