"""Metrics of a part of a process that is about one thing: its labels are given once."""

from omnidraft.ports import Metrics


class Labelled:
    """Other Metrics, with these labels added to every name."""

    def __init__(self, metrics: Metrics, **labels: str) -> None:
        self._metrics, self._labels = metrics, labels

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        self._metrics.add(name, amount, **(self._labels | labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        self._metrics.observe(name, value, **(self._labels | labels))

    def set(self, name: str, value: float, **labels: str) -> None:
        self._metrics.set(name, value, **(self._labels | labels))
