"""What a request of another engine says about its own drafting and recording, where the engine passes it on.

The names are those of our HTTP API with a prefix, since other extensions of an engine read the same arguments. By then
the request runs and cannot be refused: what cannot be read falls to the careful side.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omnidraft.config import GROUP_KEYS

SPECULATION, STORE, USER = "omnidraft_speculation", "omnidraft_store", "omnidraft_user"
_MAX_TENANT_CHARACTERS = 256

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request; None takes the deployment's setting."""

    tenant: str | None = None
    num_draft_tokens: int | None = None
    """The maximum of a round: 0 drafts nothing."""
    is_stored: bool = True
    """Whether it may be recorded for training."""


NO_OPTIONS = RequestOptions()


def read_options(arguments: Mapping[str, Any] | None) -> RequestOptions:
    """Return the options among a request's extra arguments. A wrong number of draft tokens drafts as by default; with a
    wrong tenant, or a `store` that is neither yes nor no, nothing is recorded."""
    if not arguments:
        return NO_OPTIONS
    tenant, has_tenant = _tenant(arguments.get(USER))
    is_stored = _is_stored(arguments.get(STORE))
    return RequestOptions(tenant, _num_draft_tokens(arguments.get(SPECULATION)), is_stored and has_tenant)


def _tenant(value: Any) -> tuple[str | None, bool]:
    """Return the tenant, and whether the value could be read."""
    if value is None:
        return None, True
    is_text = isinstance(value, str) and 0 < len(value) <= _MAX_TENANT_CHARACTERS and value.isprintable()
    if is_text and not value.startswith(GROUP_KEYS):
        return value, True
    message = "%s must be a text of 1 to %d characters that does not begin with %r: not recorded"
    logger.warning(message, USER, _MAX_TENANT_CHARACTERS, GROUP_KEYS)
    return None, False


def _is_stored(value: Any) -> bool:
    match str(value).lower():
        case "none" | "1" | "true":
            return True
        case "0" | "false":
            return False
    logger.warning("%s must be 0 or 1, got %r: not recorded", STORE, value)
    return False


def _num_draft_tokens(value: Any) -> int | None:
    text = str(value).lower()
    if text in ("none", "auto"):
        return None
    if text == "off":
        return 0
    if text.isdecimal():
        return int(text)
    logger.warning("%s must be auto, off or a number of tokens, got %r: taken as auto", SPECULATION, value)
    return None
