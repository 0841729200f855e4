"""The names that our servers answer to, against DNS rebinding.

A web page may have the name of its own site point to this machine, and then its scripts use a server here as their own
site. Its requests have that name as `Host`. An address is no such name: whoever has one as his site answers there.
"""

import ipaddress
import re
from collections.abc import Collection

MISDIRECTED = "the Host header names neither localhost, nor an address, nor one of worker.allowed_hosts"
"""The reason of the refusal, a 421."""
_HOST = re.compile(r"(\[[^\s\[\]]+\]|[^\s:\[\]@/]+)(:[0-9]*)?")


def is_allowed(host: str | None, names: Collection[str]) -> bool:
    """Return whether a request with this Host header is answered. One without the header comes from no browser.

    Args:
        names: further names, in lower case; "*" allows any.
    """
    if host is None or "*" in names:
        return True
    match = _HOST.fullmatch(host.strip())
    if match is None:
        return False
    name = match[1].lower().removesuffix(".")
    return f".{name}".endswith(".localhost") or name in names or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
