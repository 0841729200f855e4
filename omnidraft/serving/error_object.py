"""The error object of OpenAI's API. The module imports nothing, so that processes without models can use it."""


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """Return an error object; a lone surrogate of a client's text is shown as its escape."""
    printable = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": printable, "type": kind, "param": param, "code": code}}
