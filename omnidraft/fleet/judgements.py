"""How the judgement of a version begins, which tells what was decided about it."""

from omnidraft.ports import VOID, SnapshotVersion

CANARY = "canary at"
"""It was tried on live requests when this was written; the share follows."""
PROMOTING = "promoting"
"""It is to become champion and, as far as is known, has not."""
PROMOTED = "promoted"
"""It became champion."""
REFUSED = "refused"
"""It was measured, or tried on live requests, and does not become champion; the reason follows."""
BY_OPERATOR = f"{PROMOTED} by an operator"


def is_undecided(judgement: str | None) -> bool:
    """Return whether a version still waits: it has no judgement, or one that was not carried out to its end."""
    return judgement is None or judgement.startswith((CANARY, PROMOTING))


def was_only_canary(version: SnapshotVersion) -> bool:
    """Return whether requests that it served were a canary's, as far as is known: it was tried, and is no champion."""
    is_tried = (version.judgement or "").startswith((CANARY, f"{REFUSED}: canary", VOID))
    return is_tried and not {"champion", "previous"} & set(version.aliases)
