"""Pictures that commands and pipelines draw with matplotlib, without a screen."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnidraft.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_format(path: Path | None) -> None:
    """Raise RequestError unless matplotlib draws into files with this ending; of none for None."""
    if path is None:
        return
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise RequestError(f"cannot draw {path}: pictures end with .{', .'.join(sorted(known))}")


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
