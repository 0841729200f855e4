"""One scrape of many workers: every sample gets the name of its worker as a label."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "worker"


def merged(scrapes: Iterable[tuple[str, bytes]]) -> bytes:
    """What several workers say of themselves, each with its name, as one text in the same format."""
    registry = CollectorRegistry()
    registry.register(_Merged(scrapes))
    return generate_latest(registry)


class _Merged(Collector):
    def __init__(self, scrapes: Iterable[tuple[str, bytes]]) -> None:
        self._families: dict[str, Metric] = {}
        for worker, text in scrapes:
            for family in text_string_to_metric_families(text.decode()):
                self._take(worker, family)

    def collect(self) -> Iterator[Metric]:
        yield from self._families.values()

    def _take(self, worker: str, family: Metric) -> None:
        known = self._families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
        known.samples += [each._replace(labels={**each.labels, LABEL: worker}) for each in family.samples]
