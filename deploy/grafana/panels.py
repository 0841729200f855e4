"""The parts of a dashboard, before they are Grafana's JSON, and PromQL expressions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time."""

    title: str
    unit: str
    """Grafana's name of the unit: short, s, percentunit, bytes, ops, none."""
    description: str
    queries: tuple[Query, ...]
    minimum: float | None = 0
    maximum: float | None = None
    threshold: float | None = None
    """A value below which something is wrong."""


@dataclass(frozen=True, slots=True)
class Row:
    """A titled row of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    uid: str
    title: str
    description: str
    targets_of: str
    """The metric whose label `target` is chosen from."""
    rows: tuple[Row, ...]
    events: tuple[tuple[str, str], ...] = ()
    """(name, expression) of each kind of event that is marked in all graphs."""


CHOSEN = 'target=~"$target"'
"""The selector of every series that has a target."""
WINDOW = "[$__rate_interval]"


def rate(name: str, by: str = "", selector: str = CHOSEN) -> str:
    """Return a counter's growth a second, summed over the fleet."""
    return f"sum{_by(by)} (rate({name}{{{selector}}}{WINDOW}))"


def share(part: str, whole: str, by: str = "", selector: str = CHOSEN) -> str:
    """Return one counter's growth as a share of another's."""
    return f"{rate(part, by, selector)} / {rate(whole, by, selector)}"


def increase(name: str, by: str = "", selector: str = CHOSEN) -> str:
    """Return a counter's growth, summed over the fleet."""
    return f"sum{_by(by)} (increase({name}{{{selector}}}{WINDOW}))"


def quantile(q: float, name: str, by: str = "", selector: str = CHOSEN) -> str:
    """Return a quantile of a histogram over the fleet."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{{selector}}}{WINDOW})))"


def quantiles(name: str, by: str = "", selector: str = CHOSEN) -> tuple[Query, ...]:
    """Return queries of the median, the 95 % and the 99 % quantile."""
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(Query(quantile(q, name, by, selector), f"{q:.0%}{legend}") for q in (0.5, 0.95, 0.99))


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
