"""The error object of OpenAI's API. Imports nothing, so that a process without models can refuse in the same shape."""


def error(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """OpenAI's error object; a lone surrogate of a client's text is shown as its escape."""
    printable = message.encode("utf-8", "backslashreplace").decode()
    return {"error": {"message": printable, "type": kind, "param": param, "code": code}}
