"""A signature covers every field, and survives fields that are added later."""

import pytest

from omnidraft.errors import SnapshotCorrupt
from omnidraft.snapshots.manifest import Manifest, require_signature, sign
from tests.snapshot_folders import manifest

KEY = "secret"
FIELDS = {"losses": {"dm": 0.1 + 0.2, "tiny": 5e-324}, "offsets": {1: 2, 0: 3}, "sha256": {"serving/x": "ab"}}


def test_a_signature_survives_being_written_and_read():
    signed_manifest = sign(manifest(**FIELDS), KEY)
    require_signature(Manifest.model_validate_json(signed_manifest.model_dump_json()), KEY)


@pytest.mark.parametrize(
    "change",
    [{"sha256": {"serving/x": "ac"}}, {"offsets": {0: 3}}, {"target": "other"}, {"num_records": 1}, {"parent_id": "p"}],
)
def test_no_field_can_be_changed(change):
    signed_manifest = sign(manifest(**FIELDS), KEY)
    with pytest.raises(SnapshotCorrupt, match="s1 was changed"):
        require_signature(signed_manifest.model_copy(update=change), KEY)


@pytest.mark.parametrize("signature", [None, "", "00" * 32, "é"])
def test_no_other_signature_passes(signature):
    with pytest.raises(SnapshotCorrupt, match=r"registry\.signing_key"):
        require_signature(manifest(**FIELDS).model_copy(update={"signature": signature}), KEY)


def test_the_signature_of_a_manifest_never_changes():
    """A golden one: snapshots outlive the code that signed them."""
    assert sign(manifest(**FIELDS), KEY).signature == "4c40cee4c8a783b15439be75aef5d03e7362c350dec94bb999e3474bd92db00c"


def test_a_field_that_is_added_later_does_not_undo_old_signatures():
    class Later(Manifest):
        added: str | None = None

    signed_manifest = sign(manifest(**FIELDS), KEY)
    require_signature(Later.model_validate_json(signed_manifest.model_dump_json()), KEY)


def test_without_a_key_nothing_is_signed_and_nothing_required():
    assert sign(manifest(), None) == manifest()
    require_signature(manifest(), None)
