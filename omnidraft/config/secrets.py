"""What must not be shown: fields that hold a secret, and the credentials inside a URL."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

KEY_BYTES = 32
HIDDEN = "***"


def masked(text: str) -> str:
    """The text with user and password of every URL in it hidden, and passwords among a URL's parameters."""
    without_user = re.sub(r"//[^/\s'\"]*@", f"//{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:password|token|secret)[^=&\s]*=)[^&\s'\"]+", rf"\1{HIDDEN}", without_user)


def require_key(name: str, key: SecretStr) -> None:
    """Raises ValueError, which does not show the key, unless it is one as `omnidraft traces new-key` makes them."""
    try:
        num_bytes = len(base64.b64decode(key.get_secret_value(), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError):
        num_bytes = 0
    if num_bytes != KEY_BYTES:
        raise ValueError(f"{name} must be {KEY_BYTES} bytes in URL-safe base64; `omnidraft traces new-key` makes one")


def holds_secret(model: type[BaseModel], place: Sequence[int | str]) -> bool:
    """Whether the field at this place, or any below it, is a secret; the place may go on behind a field, and lead
    through the items of a list."""
    if place and isinstance(place[0], int):
        return holds_secret(model, place[1:])
    if not place:
        return any(holds_secret(model, (name,)) for name in model.model_fields)
    field = model.model_fields.get(str(place[0]))
    if field is None:
        return False
    kinds = list(_kinds(field.annotation))
    return SecretStr in kinds or any(holds_secret(kind, place[1:]) for kind in kinds if _is_section(kind))


def _kinds(annotation: Any) -> Sequence[Any]:
    """The types in an annotation such as `tuple[SecretStr, ...]` or `SecretStr | None`."""
    inner = get_args(annotation)
    return [kind for each in inner for kind in _kinds(each)] if inner else [annotation]


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
