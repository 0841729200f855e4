"""The reports of pipelines: JSON files, with milliseconds."""

from omnidraft.files import save_json as save

__all__ = ["ms", "save"]


def ms(seconds: float) -> float:
    """Return milliseconds with three decimal places."""
    return round(seconds * 1000, 3)
