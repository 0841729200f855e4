"""Pictures that commands and pipelines draw with matplotlib, without a screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@contextmanager
def picture(path: Path, **subplots: Any) -> Iterator[tuple["Figure", Any]]:
    """Yield a new figure and its axes; save what was drawn, without margins, and make the folder where it is missing.

    Args:
        subplots: arguments of `pyplot.subplots`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(**subplots)
    try:
        yield figure, axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=120, bbox_inches="tight")
    finally:
        pyplot.close(figure)
