"""Held-out agreement: by tenant, bounded in number, and on a file that nobody who writes to the log can change."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omnidraft.distill.evaluation.held_out import (
    MOST_RECORDS,
    MOST_TENANTS,
    HeldOut,
    ScoredRecord,
    by_tenant,
    read_pinned,
)
from omnidraft.distill.ingest.tenant_shares import TenantGroups
from omnidraft.errors import ConfigError
from omnidraft.snapshots.manifest import Manifest
from omnidraft.stats import paired_standard_error
from omnidraft.traces import archive
from tests.snapshot_folders import manifest
from tests.tiny_pair import Pair
from tests.trace_records import make_record


def scored(group: str, number: int, before: int, after: int, num: int = 10) -> ScoredRecord:
    positions = np.arange(num)
    return ScoredRecord(group, f"{group}-{number}", positions < before, positions < after)


def test_each_tenant_is_told_with_its_paired_error_and_small_ones_together() -> None:
    acme = [scored("acme", number, 5, 6 + number % 2) for number in range(6)]
    bolt = [scored("bolt", number, 5, 3) for number in range(4)]
    small = [scored("cord", 0, 4, 4), scored("dune", 0, 4, 5), scored("dune", 1, 4, 5)]
    told = by_tenant([*small, *bolt, *acme])
    assert [(each.tenant, each.num_requests) for each in told] == [("acme", 6), ("bolt", 4), (None, 3)]
    assert [(each.before, each.after) for each in told] == [
        (0.5, pytest.approx(0.65)),
        (0.5, 0.3),
        (0.4, pytest.approx(14 / 30)),
    ]
    expected = paired_standard_error((each.request, each.before_P, each.after_P) for each in acme)
    assert told[0].change_error == expected
    assert told[1].change_error == 0


def test_segments_of_one_request_are_one_request_and_records_without_positions_none() -> None:
    segments = [replace(scored("acme", 0, 5, 6), request="one") for _ in range(5)]
    assert [(each.tenant, each.num_requests) for each in by_tenant(segments)] == [(None, 1)]
    assert by_tenant([scored("acme", number, 0, 0, num=0) for number in range(5)]) == ()


def test_a_manifest_stays_small_however_many_tenants_there_are_and_however_long_their_names() -> None:
    records = [
        scored(name, number, 5, 6)
        for name in (f"{tenant:04d}{'x' * 5_000}" for tenant in range(MOST_TENANTS + 20))
        for number in range(4)
    ]
    told = by_tenant(records)
    assert len(told) == MOST_TENANTS + 1
    assert told[-1].tenant is None
    assert told[-1].num_requests == 80
    assert len({each.tenant for each in told}) == len(told)
    assert len(manifest("s1", tenants=told).model_dump_json()) < 10_000


def test_both_sides_are_measured_on_the_records_of_each_group(pair: Pair) -> None:
    learner = pair.learner(learning_rate=1e-2)
    records = [pair.record(f"r{n}", seed=n, tenant=("acme", "bolt", "sybil-1", "sybil-2")[n % 4]) for n in range(16)]
    held_out = HeldOut(learner, groups=TenantGroups(["acme", "bolt"]))
    held_out.set_parent(learner.serving_tensors())
    for _ in range(30):
        learner.step(records[:4])
    measured = held_out.measure(records, learner.serving_tensors())
    assert [(each.tenant, each.num_requests) for each in measured.tenants] == [("acme", 4), ("bolt", 4), (None, 8)]
    with learner.serving(learner.serving_tensors()):
        assert measured.tenants[0].after == learner.agreement(records[::4])
    assert measured.tenants[0].after > measured.tenants[0].before
    assert (
        Manifest.model_validate_json(manifest("s1", **measured.facts()).model_dump_json()).tenants == measured.tenants
    )


def test_the_pinned_file_is_measured_before_and_after_and_never_read_again(pair: Pair, tmp_path: Path) -> None:
    path, learner = tmp_path / "pinned.avro", pair.learner(learning_rate=1e-2)
    records = [pair.record(f"pinned-{number}", seed=number) for number in range(4)]
    archive.write(path, records)
    held_out = HeldOut(learner, pinned=read_pinned(path, pair.alignment.fingerprint))
    path.unlink()
    held_out.set_parent(learner.serving_tensors())
    with learner.serving(learner.serving_tensors()):
        base = learner.agreement(records)
    for _ in range(30):
        learner.step(records)
    measured = held_out.measure([], learner.serving_tensors())
    assert measured.pinned is not None
    assert (measured.pinned.before, measured.pinned.num_records) == (base, 4)
    assert measured.pinned.after > measured.pinned.before
    held_out.set_parent(learner.serving_tensors(), measured)
    again = held_out.measure([], learner.serving_tensors())
    assert again.pinned is not None
    assert (again.pinned.before, again.pinned.after) == (measured.pinned.after, measured.pinned.after)


def test_a_record_of_the_log_with_the_id_of_a_pinned_one_does_not_take_its_place(pair: Pair, tmp_path: Path) -> None:
    path, learner = tmp_path / "pinned.avro", pair.learner()
    archive.write(path, [pair.record("pinned-1")])
    held_out = HeldOut(learner, pinned=read_pinned(path, pair.alignment.fingerprint))
    held_out.set_parent(learner.serving_tensors())
    alone = held_out.measure([], learner.serving_tensors()).pinned
    forged = pair.record("pinned-1", emitted=[5] * 40)
    assert held_out.measure([forged], learner.serving_tensors()).pinned == alone


@pytest.mark.parametrize(
    ("num", "alignment", "message_part"),
    [(0, "a", "has no record"), (MOST_RECORDS + 1, "a", "more than 256"), (2, "b", "of the vocabulary pair b")],
)
def test_a_pinned_file_of_another_size_or_pair_is_refused(
    tmp_path: Path, num: int, alignment: str, message_part: str
) -> None:
    path = tmp_path / "pinned.avro"
    archive.write(path, [make_record(f"r{n}", alignment=alignment, num_emitted=1, num_kept=1) for n in range(num)])
    with pytest.raises(ConfigError, match=message_part):
        read_pinned(path, "a")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pinned(tmp_path / "none.avro", "a")
    path.write_bytes(b"no archive")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pinned(path, "a")
