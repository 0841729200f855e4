"""A signature covers every field, and survives fields that are added later."""

import pytest

from omnidraft.errors import SnapshotCorrupt
from omnidraft.snapshots.manifest import Manifest, digest
from omnidraft.snapshots.signing import UNSIGNED
from tests.signed_fleet import new_signing
from tests.snapshot_folders import manifest

FIELDS = {"losses": {"dm": 0.1 + 0.2, "tiny": 5e-324}, "offsets": {1: 2, 0: 3}, "sha256": {"serving/x": "ab"}}
SIGNING = new_signing()


def test_a_signature_survives_being_written_and_read():
    signed_manifest = SIGNING.sign(manifest(**FIELDS))
    SIGNING.require(Manifest.model_validate_json(signed_manifest.model_dump_json()))


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("field", sorted(Manifest.model_fields.keys() - {"signatures"}))
def test_no_field_can_be_changed(field):
    changed = SIGNING.sign(manifest(**FIELDS)).model_copy(update={field: "another"})
    with pytest.raises(SnapshotCorrupt, match="it was changed, or not signed"):
        SIGNING.require(changed)


def test_what_is_signed_of_a_manifest_never_changes():
    """A golden one: snapshots outlive the code that signed them."""
    assert digest(manifest(**FIELDS)) == "50211ef254aadbeb17ed9a9cfaa3c5891c051b3795f4654c5a717223ca146d99"


def test_a_field_that_is_added_later_does_not_undo_old_signatures():
    class Later(Manifest):
        added: str | None = None

    signed_manifest = SIGNING.sign(manifest(**FIELDS))
    SIGNING.require(Later.model_validate_json(signed_manifest.model_dump_json()))


def test_without_a_key_nothing_is_signed_and_nothing_required():
    assert UNSIGNED.sign(manifest()) == manifest()
    UNSIGNED.require(manifest())
