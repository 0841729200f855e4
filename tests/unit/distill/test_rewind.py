"""After refusals learning goes back to the champion, and on from its own place: nothing is lost or learned twice."""

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from omnidraft.distill.control import TrainingControl
from omnidraft.distill.publisher import LEARNER
from omnidraft.errors import SnapshotStale
from omnidraft.ports import Restart, Rewind, SnapshotVersion
from omnidraft.snapshots import bundle
from tests.audit_case import CLEAN, case_of
from tests.control_logs import Orders
from tests.distiller_runs import Killed, Setting, learned, names, run_until_idle
from tests.snapshot_folders import publish_copy
from tests.tiny_pair import assert_same


def rewind(setting: Setting, version: str = "champion", **fields) -> TrainingControl:
    """The order to go back from the newest snapshot to this version."""
    number = setting.registry.resolve(version).version
    order = Rewind(version=number, id=setting.manifest().snapshot_id, **fields)
    return TrainingControl(Orders((0, ("rewind",), order)))


def weights(setting: Setting, version: str, part: str = bundle.DRAFTER) -> dict[str, torch.Tensor]:
    number = setting.registry.resolve(version).version
    folder = setting.registry.fetch(number, setting.folder / "look", (part.partition("/")[0],))
    return bundle.tensors(folder, part)


def learner_state(setting: Setting, version: str) -> dict[str, torch.Tensor]:
    return weights(setting, version, LEARNER)


def after_refusals(pair, folder: Path, **learner) -> Setting:
    """Version 3 is the champion, 4 to 6 were refused, and six records wait."""
    made = Setting(pair, folder, **learner)
    made.emit(*names(8))
    run_until_idle(made.distiller(held_out_every=5)[0])
    made.registry.promote(made.registry.resolve("latest").version)
    made.emit(*names(12, start=8))
    run_until_idle(made.distiller(held_out_every=5)[0])
    made.emit(*names(6, start=20))
    return made


@pytest.fixture
def setting(pair, tmp_path: Path) -> Setting:
    return after_refusals(pair, tmp_path)


def twin_of(setting: Setting) -> Setting:
    """Return one with the same log and a copy of the registry."""
    twin = Setting(setting.pair, setting.folder / "twin", **setting.learner)
    twin.log = setting.log
    shutil.copytree(setting.folder / "registry", twin.folder / "registry")
    return twin


def versions(setting: Setting) -> tuple[SnapshotVersion, ...]:
    return setting.registry.versions()


def rewound(setting: Setting) -> SnapshotVersion:
    (found,) = (each for each in versions(setting) if each.manifest.continues_id)
    return found


def test_weights_optimizer_and_cache_are_the_champions_and_the_place_is_its_own(setting: Setting) -> None:
    champion, refused = setting.manifest("champion"), setting.manifest()
    distillation, journal = setting.distiller(held_out_every=5, control=rewind(setting))
    run_until_idle(distillation)
    version = rewound(setting)
    manifest, number = version.manifest, str(version.version)
    assert (manifest.parent_id, manifest.continues_id) == (champion.snapshot_id, refused.snapshot_id)
    assert (manifest.offsets, manifest.num_records, manifest.counts) == (
        refused.offsets,
        refused.num_records,
        refused.counts,
    )
    assert manifest.agreement_before == manifest.agreement_after
    assert_same(weights(setting, number), weights(setting, "champion"))
    first = rewound(setting).manifest.offsets[0]
    assert first < setting.manifest().offsets[0]
    assert set(learned(journal)) <= set(names(26)[first:])
    assert case_of(setting).kinds() == CLEAN


def test_the_champions_optimizer_is_there_however_many_snapshots_were_refused(setting: Setting) -> None:
    """registry.keep_resume is 2 here, and there are more snapshots since."""
    champion = setting.registry.resolve("champion").version
    assert versions(setting)[-1].version - champion >= 2
    before = learner_state(setting, str(champion))
    assert any(name.startswith("exp_avg") for name in before)
    distillation, _ = setting.distiller(held_out_every=5, control=rewind(setting))
    run_until_idle(distillation, 2)
    assert_same(learner_state(setting, str(rewound(setting).version)), before)


@pytest.mark.parametrize("after", ["before it is published", "right after"])
def test_killed_in_the_middle_it_is_done_once_and_the_end_is_the_same(
    setting: Setting, after: str, tmp_path: Path
) -> None:
    control, again = rewind(setting), rewind(setting)
    num_before = len(versions(setting))

    class Dying:
        """A registry whose process dies as the champion's weights are published."""

        def __getattr__(self, name: str):
            return getattr(setting.registry, name)

        def publish(self, folder: Path, parent: int | None) -> SnapshotVersion:
            if bundle.read_manifest(folder).continues_id is None:
                return setting.registry.publish(folder, parent)
            if after == "right after":
                setting.registry.publish(folder, parent)
            raise Killed

    with suppress(Killed):
        run_until_idle(setting.distiller(held_out_every=5, control=control, registry=Dying())[0])
    assert len(versions(setting)) == num_before + (after == "right after")
    distillation, journal = setting.distiller(held_out_every=5, control=again)
    run_until_idle(distillation)
    assert rewound(setting).version == num_before + 1
    first = rewound(setting).manifest.offsets[0]
    assert first < setting.manifest().offsets[0]
    assert set(learned(journal)) <= set(names(26)[first:])
    assert case_of(setting).kinds() == CLEAN


def test_with_the_base_drafter_as_champion_learning_begins_with_it_again(setting: Setting) -> None:
    setting.registry.promote(1)
    distillation, _ = setting.distiller(held_out_every=5, control=rewind(setting))
    run_until_idle(distillation, 2)
    version = rewound(setting)
    assert version.manifest.parent_id == setting.manifest("1").snapshot_id
    assert_same(weights(setting, str(version.version)), setting.pair.learner().serving_tensors())
    assert not any(name.startswith("exp_avg") for name in learner_state(setting, str(version.version)))


def test_an_operator_sends_learning_back_to_any_version(setting: Setting) -> None:
    refused = setting.manifest()
    run_until_idle(setting.distiller(held_out_every=5, control=rewind(setting, "2", is_ordered=True))[0], 2)
    version = rewound(setting)
    assert version.manifest.parent_id == setting.manifest("2").snapshot_id != setting.manifest("champion").snapshot_id
    assert version.manifest.offsets == refused.offsets
    assert_same(weights(setting, str(version.version)), weights(setting, "2"))


def test_a_restart_that_was_carried_out_is_not_carried_out_again_by_whoever_goes_on_from_an_earlier_version(
    setting: Setting,
) -> None:
    rewind = Rewind(version=2, id=setting.manifest().snapshot_id, is_ordered=True)
    orders = Orders((0, ("restart",), Restart(start="latest", id="order")), (0, ("rewind",), rewind))
    run_until_idle(setting.distiller(held_out_every=5, control=TrainingControl(orders))[0])
    assert rewound(setting).manifest.restarts == ("order",)


@pytest.mark.parametrize("what", ["champion by now", "of another lineage", "without weights", "champion unreadable"])
def test_an_order_without_anything_to_go_back_from_changes_nothing(setting: Setting, what: str) -> None:
    control = rewind(setting)
    if what == "champion by now":
        setting.registry.promote(setting.registry.resolve("latest").version)
    elif what == "without weights":
        control = rewind(setting, "2", is_ordered=True)
        setting.registry.remove_files(2, ("serving",))
    elif what == "of another lineage":
        control = TrainingControl(Orders((0, ("rewind",), Rewind(version=3, id="unknown"))))
    else:
        number = setting.registry.resolve("champion").version
        for file in setting.folder.glob(f"registry/**/v{number:06d}/snapshot/serving/*"):
            file.write_bytes(b"damaged")
    distillation, journal = setting.distiller(held_out_every=5, control=control)
    with suppress(SnapshotStale):
        run_until_idle(distillation)
    assert not [each for each in versions(setting) if each.manifest.continues_id]
    assert learned(journal)


Edit = Callable[[Path], tuple[dict, dict]]
"""Folder of a snapshot -> the fields of its manifest and the files that are others in a copy."""


def publish_edited_champion(setting: Setting, edit: Edit) -> SnapshotVersion:
    champion, folder = setting.registry.resolve("champion"), setting.folder
    fetched = setting.registry.fetch(champion.version, folder / "fetched", bundle.parts_of(champion.manifest))
    fields, files = edit(fetched)
    own = {"snapshot_id": "edited", "parent_id": champion.manifest.snapshot_id}
    files = {**{name: fetched / name for name in champion.manifest.sha256}, **files}
    bundle.write(folder / "edited", champion.manifest.model_copy(update={**own, **fields}), files)
    return setting.registry.publish(folder / "edited", setting.registry.resolve("latest").version)


def of_another_shape(folder: Path, prefix: str = "") -> tuple[dict, dict]:
    """Only the matrices whose names begin so are."""
    tensors = bundle.tensors(folder, LEARNER)
    others = {name: each[:1].clone() for name, each in tensors.items() if each.ndim == 2 and name.startswith(prefix)}
    return {}, {LEARNER: {**tensors, **others}}


def of_another_kind(folder: Path) -> tuple[dict, dict]:
    return {"train": "lora"}, {}


@pytest.mark.parametrize(
    ("edit", "head"),
    [(of_another_kind, False), (partial(of_another_shape, prefix="head."), True)],
    ids=["of another kind", "its head alone of another shape"],
)
def test_where_the_champion_does_not_fit_the_learner_learning_goes_on_as_it_is(
    pair, tmp_path: Path, edit: Edit, head: bool
) -> None:
    setting = after_refusals(pair, tmp_path, head=head)
    setting.registry.promote(publish_edited_champion(setting, edit).version)
    publish_copy(setting.registry, str(versions(setting)[-2].version), tmp_path / "made")
    twin = twin_of(setting)
    run_until_idle(twin.distiller(held_out_every=5)[0])
    distillation, journal = setting.distiller(held_out_every=5, control=rewind(setting))
    run_until_idle(distillation)
    assert not [each for each in versions(setting) if each.manifest.continues_id]
    assert learned(journal)
    assert_same(learner_state(setting, "latest"), learner_state(twin, "latest"))
