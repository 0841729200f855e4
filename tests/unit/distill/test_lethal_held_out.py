"""A held-out record of a snapshot that ends every process which measures with it."""

from pathlib import Path

import pytest

from omnidraft.distill.ingest.poison_detector import PoisonDetector
from omnidraft.distill.ingest.record_disposition import is_held_out
from tests.distiller_runs import Killed, Setting, learned, names, run_until_idle

TRIES = 2


class Fleet(Setting):
    """Distillers one after the other, with one crash journal."""

    def run(self, lethal: str | None = None) -> list[str]:
        """Run one; return what it learned, or raise Killed where it meets this record."""
        detector = PoisonDetector(self.folder / "trying.json", tries=TRIES)
        distillation, learner = self.distiller(
            held_out_every=3, limits={"poison": detector.poison}, poison_detector=detector
        )
        hits, dry_run = learner.learner.hits, learner.learner.dry_run

        def meet(records) -> None:
            if lethal in [record.request_id for record in records]:
                raise Killed

        learner.learner.hits = lambda records, **options: [meet(records), hits(records, **options)][1]
        learner.learner.dry_run = lambda record: [meet([record]), dry_run(record)][1]
        run_until_idle(distillation)
        self.held_out = [record.request_id for record in distillation.ingest.batcher.held_out]
        return learned(learner)


def test_it_is_found_and_dropped_and_nothing_else_is(pair, tmp_path: Path) -> None:
    fleet = Fleet(pair, tmp_path)
    fleet.emit(*fleet.names(12))
    fleet.run()
    lethal, *others = fleet.held_out
    assert others
    fleet.emit(*[name for name in names(40, start=100) if not is_held_out(fleet.record(name), 3)][:4])
    for _ in range(TRIES + TRIES):
        with pytest.raises(Killed):
            fleet.run(lethal)
    fleet.run(lethal)
    manifest = fleet.manifest()
    assert manifest.num_records + manifest.counts["held_out"] == 16
    assert not manifest.counts.get("poison")
    assert lethal not in fleet.held_out
    assert set(others) <= set(fleet.held_out)
    assert not (tmp_path / "trying.json").exists()
    assert fleet.run(lethal) == []
