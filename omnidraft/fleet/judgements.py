"""How the judgement of a version begins, which tells what was decided about it."""

CANARY = "canary at"
"""It was tried on live requests when this was written; the share follows."""
PROMOTING = "promoting"
"""It is to become champion and, as far as is known, has not."""
PROMOTED = "promoted"
"""It became champion."""
BY_OPERATOR = f"{PROMOTED} by an operator"


def is_undecided(judgement: str | None) -> bool:
    """Return whether a version still waits: it has no judgement, or one that was not carried out to its end."""
    return judgement is None or judgement.startswith((CANARY, PROMOTING))
