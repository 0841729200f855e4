"""The check of the key store: whether it answers, and whether its keys open."""

from omnidraft.config import Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning


def store(settings: Settings) -> Finding:
    """Check the key store of a log with encryption, without creating or changing anything."""
    from omnidraft.assembly import logs, tenants

    if logs.key_store(settings) is None:
        message = "there is none: all is encrypted with the master key, and no tenant can be forgotten at once"
        return warning("key store", message, "set log.key_store to a database that all services reach")
    num_open, num_closed, num_destroyed = tenants.count_keys(settings)
    message = f"{num_open} keys of tenants, {num_destroyed} destroyed"
    if num_closed:
        advice = "add the master key that they were wrapped with to log.encryption_keys, behind the others"
        return problem("key store", f"{message}; {num_closed} that no master key opens", advice)
    return ok("key store", message)
