"""Secrets in settings: masking of credentials in URLs, checks of keys, and fields that hold secrets."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, SecretStr

KEY_BYTES = 32
"""The length of every key, private or public."""
PRIVATE_KEY_PREFIX = "ed25519-private:"
ROLES = ("distiller", "controller", "operator")
"""Who signs: a distiller its snapshots, a controller its announcements, an operator both."""
HIDDEN = "***"


def masked(text: str) -> str:
    """Return the text with private keys, and user, password and secret parameters of every URL in it, masked."""
    text = re.sub(rf"{PRIVATE_KEY_PREFIX}[^\s'\"]*", PRIVATE_KEY_PREFIX + HIDDEN, text)
    without_user = re.sub(r"//[^/\s'\"]*@", f"//{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:password|token|secret)[^=&\s]*=)[^&\s'\"]+", rf"\1{HIDDEN}", without_user)


def require_key(name: str, key: SecretStr) -> None:
    """Raises ValueError, which does not show the key, unless it has the format of `omnidraft traces new-key`."""
    if not _has_key_bytes(key.get_secret_value()):
        raise ValueError(f"{name} must be {KEY_BYTES} bytes in URL-safe base64; `omnidraft traces new-key` makes one")


def require_private_key(key: SecretStr) -> None:
    """Raises ValueError, which does not show the key, unless it is a private key of `omnidraft snapshots new-key`."""
    prefix, _, encoded = key.get_secret_value().partition(":")
    if f"{prefix}:" != PRIVATE_KEY_PREFIX or not _has_key_bytes(encoded):
        raise ValueError(
            f"registry.private_key must be {PRIVATE_KEY_PREFIX}KEY; `omnidraft snapshots new-key` makes one"
        )


def require_public_key(key: str) -> None:
    """Raises ValueError unless it is a public key of `omnidraft snapshots new-key`. A private one is not shown."""
    if key.startswith(PRIVATE_KEY_PREFIX):
        raise ValueError("registry.trusted_keys holds a private key: replace that key pair, and give the public half")
    role, _, rest = key.partition(":")
    kind, _, encoded = rest.partition(":")
    if role not in ROLES or kind != "ed25519" or not _has_key_bytes(encoded):
        raise ValueError(
            f"each of registry.trusted_keys must be ROLE:ed25519:KEY, ROLE one of {', '.join(ROLES)}; "
            "`omnidraft snapshots new-key` makes one"
        )


def _has_key_bytes(encoded: str) -> bool:
    try:
        return len(base64.b64decode(encoded, altchars=b"-_", validate=True)) == KEY_BYTES
    except (binascii.Error, ValueError):
        return False


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
