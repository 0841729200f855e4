"""Secrets in settings: masking of credentials in URLs, checks of keys, and fields that hold secrets."""

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, SecretStr

KEY_BYTES = 32
"""The length of every key, private or public."""
PRIVATE_KEY_PREFIX = "ed25519-private:"
ROLES = ("distiller", "controller", "operator", "worker")
"""Who signs: a distiller its snapshots, a controller what serves, an operator both, a worker receipts."""
MIN_KEY_CHARS = 16
HIDDEN = "***"


def masked(text: str) -> str:
    """Return the text with private keys, and user, password and secret parameters of every URL in it, masked."""
    text = re.sub(rf"{PRIVATE_KEY_PREFIX}[^\s'\"]*", PRIVATE_KEY_PREFIX + HIDDEN, text)
    without_user = re.sub(r"//[^/\s'\"]*@", f"//{HIDDEN}@", text)
    return re.sub(r"(?i)([?&][^=&\s]*(?:password|token|secret)[^=&\s]*=)[^&\s'\"]+", rf"\1{HIDDEN}", without_user)


def _encryption_key(key: SecretStr) -> SecretStr:
    if not _has_key_bytes(key.get_secret_value()):
        raise ValueError(f"must be {KEY_BYTES} bytes in URL-safe base64; `omnidraft traces new-key` makes one")
    return key


def _private_key(key: SecretStr) -> SecretStr:
    prefix, _, encoded = key.get_secret_value().partition(":")
    if f"{prefix}:" != PRIVATE_KEY_PREFIX or not _has_key_bytes(encoded):
        raise ValueError(f"must be {PRIVATE_KEY_PREFIX}KEY; `omnidraft snapshots new-key` makes one")
    return key


def _public_key(key: str) -> str:
    if key.startswith(PRIVATE_KEY_PREFIX):
        raise ValueError("holds a private key: replace that key pair, and give the public half")
    role, _, rest = key.partition(":")
    kind, _, encoded = rest.partition(":")
    if role not in ROLES or kind != "ed25519" or not _has_key_bytes(encoded):
        roles = ", ".join(ROLES)
        raise ValueError(f"must be ROLE:ed25519:KEY, ROLE one of {roles}; `omnidraft snapshots new-key` makes one")
    return key


def _sendable(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if len(text) < MIN_KEY_CHARS or not all("!" <= char <= "~" for char in text):
        raise ValueError(f"a key has {MIN_KEY_CHARS} printable ASCII letters or more, without spaces")
    return key


def _has_key_bytes(encoded: str) -> bool:
    try:
        return len(base64.b64decode(encoded, altchars=b"-_", validate=True)) == KEY_BYTES
    except (binascii.Error, ValueError):
        return False


EncryptionKey = Annotated[SecretStr, AfterValidator(_encryption_key)]
"""One of `omnidraft traces new-key`."""
PrivateKeyText = Annotated[SecretStr, AfterValidator(_private_key)]
"""One of `omnidraft snapshots new-key`."""
PublicKeyText = Annotated[str, AfterValidator(_public_key)]
"""The same."""
ClientKey = Annotated[SecretStr, AfterValidator(_sendable)]
"""What clients send as `Authorization: Bearer KEY`."""


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
