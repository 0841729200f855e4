"""The error of a request for a mode that the target cannot serve."""

from omnidraft.errors import ModeRefused, RequestError
from omnidraft.ports import Mode


def text_error(error: Exception, mode: Mode, default_mode: Mode) -> Exception:
    """Return the error that ends a text of this mode: the request's own where the target refuses a mode that is not the
    deployment's, since no setting is wrong then."""
    if isinstance(error, ModeRefused) and mode != default_mode:
        return RequestError(f"mode: not served here: {error.reason}")
    return error
