"""The cipher of what snapshots keep of users, from settings."""

from omnidraft.assembly.logs import tenant_keys
from omnidraft.config import Settings
from omnidraft.ports import RecordCipher


def record_cipher(settings: Settings) -> RecordCipher | None:
    """Return the cipher of records, tenants' factors and memories in snapshots, of one thread; None without
    encryption. Nothing is opened yet."""
    keys = [key.get_secret_value() for key in settings.log.encryption_keys]
    if not keys:
        return None
    from omnidraft.bus.tenant_keys import MasterKeys

    return tenant_keys(settings) or MasterKeys(keys)
