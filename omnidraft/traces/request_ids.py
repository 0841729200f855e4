"""The ids of a request's answers: several of one request are alike, so they are learned or held out together.

The first answer has the request's own id, or one that continues it as the others do, after `#`.
"""

_MARK = "#"


def answer_id(request_id: str, name: str | int) -> str:
    """Return the id of a further answer of a request, by its number or another name without `#`."""
    return f"{request_id}{_MARK}{name}"


def request_of(answer: str) -> str:
    """Return the id of the request of an answer."""
    return answer.rpartition(_MARK)[0] or answer
