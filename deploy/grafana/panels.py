"""What a dashboard is made of, before it is Grafana's JSON."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression and how its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time."""

    title: str
    unit: str
    """Grafana's name of it: short, s, percentunit, bytes, ops, none."""
    description: str
    queries: tuple[Query, ...]
    minimum: float | None = 0
    maximum: float | None = None
    threshold: float | None = None
    """Below it something is wrong."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    uid: str
    title: str
    description: str
    targets_of: str
    """The metric whose label `target` is chosen from."""
    rows: tuple[Row, ...]
    events: tuple[tuple[str, str], ...] = ()
    """Name and expression of what is marked in all graphs."""


CHOSEN = 'target=~"$target"'
"""The selector of every series that has a target."""
WINDOW = "[$__rate_interval]"


def rate(name: str, by: str = "", selector: str = CHOSEN) -> str:
    """A counter's growth a second, summed over the fleet."""
    return f"sum{_by(by)} (rate({name}{{{selector}}}{WINDOW}))"


def share(part: str, whole: str, by: str = "", selector: str = CHOSEN) -> str:
    """How much of one counter's growth another one is."""
    return f"{rate(part, by, selector)} / {rate(whole, by, selector)}"


def increase(name: str, by: str = "", selector: str = CHOSEN) -> str:
    """How often something happened."""
    return f"sum{_by(by)} (increase({name}{{{selector}}}{WINDOW}))"


def quantile(q: float, name: str, by: str = "", selector: str = CHOSEN) -> str:
    """Of a distribution over the fleet."""
    labels = f"{by}, le" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{{selector}}}{WINDOW})))"


def quantiles(name: str, by: str = "", selector: str = CHOSEN) -> tuple[Query, ...]:
    """Median, 95 and 99 %."""
    legend = f" {{{{{by}}}}}" if by else ""
    return tuple(Query(quantile(q, name, by, selector), f"{q:.0%}{legend}") for q in (0.5, 0.95, 0.99))


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
