"""Owners of memory: each tenant has a memory of its own, unless the operator put it into a group (`memory.groups`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from omnidraft.config import GROUP_KEYS


@dataclass(frozen=True, slots=True, order=True)
class Owner:
    """A tenant, or a group of tenants, whose texts are drafted for each of them. The kind keeps a tenant that calls
    itself like a group apart from it."""

    kind: Literal["group", "tenant"]
    name: str

    @property
    def key_name(self) -> str:
        """The name under which the key store keeps the keys of this memory; a tenant's are those of its records."""
        return self.name if self.kind == "tenant" else GROUP_KEYS + self.name


class Owners:
    """Finds the owner of a tenant's texts."""

    def __init__(self, groups: Mapping[str, str]) -> None:
        """Let the tenants of `groups`, which says tenant -> group, share the memory of their group."""
        self._groups = dict(groups)

    def of(self, tenant: str) -> Owner:
        """Return the owner of this tenant's texts."""
        group = self._groups.get(tenant)
        return Owner("tenant", tenant) if group is None else Owner("group", group)
