"""The tenants of one snapshot that draft with low-rank factors of their own over the weights that all share."""

from collections.abc import Callable, Mapping

from omnidraft.ports import DraftSession

OpenSession = Callable[[], DraftSession]
"""Opens a session of the snapshot's draft model, which takes part in that model's passes."""


class LoadedFactors:
    """Opens the sessions of each tenant. One thread drafts; another may forget a tenant meanwhile. All but `opener`
    name tenants as their records do."""

    def __init__(
        self,
        openers: Mapping[str, OpenSession],
        serves: Callable[[str], bool] = lambda tenant: True,
        recorded_as: Callable[[str], str | None] = lambda tenant: tenant,
    ) -> None:
        """
        Args:
            openers: by tenant; each holds the factors that its sessions add.
            serves: whether this tenant's factors are used for texts that begin now.
            recorded_as: returns the name under which a tenant's records are written; None: none are.
        """
        self._openers, self._serves, self._recorded_as = dict(openers), serves, recorded_as

    @property
    def tenants(self) -> frozenset[str]:
        """The tenants whose factors are in memory."""
        return frozenset(self._openers)

    def opener(self, tenant: str) -> OpenSession | None:
        """Return what opens the sessions of a request's tenant; None: it drafts with the shared weights alone."""
        name = self._recorded_as(tenant)
        return self._openers.get(name) if name is not None and self._serves(name) else None

    def forget(self, tenant: str) -> None:
        """Free a tenant's factors once its running texts end."""
        self._openers.pop(tenant, None)
