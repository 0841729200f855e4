"""A manifest in the tags of an MLflow model version: one tag, or as many as its length needs, as MLflow limits each.

All tags of a version are written together with it, so a version has its whole manifest or none.
"""

from collections.abc import Mapping
from itertools import count, takewhile

from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest

MANIFEST_TAG = "omnidraft.manifest"
"""The tag with the manifest, or with the first piece of it; the others are `omnidraft.manifest.2` and so on."""
MAX_TAG_CHARACTERS = 100_000
"""MLflow refuses longer tags of model versions."""


def to_tags(manifest: Manifest) -> dict[str, str]:
    """Return the tags that hold the manifest."""
    text = manifest.model_dump_json()
    starts = range(0, len(text), MAX_TAG_CHARACTERS)
    return {_tag(number): text[start : start + MAX_TAG_CHARACTERS] for number, start in enumerate(starts, start=1)}


def from_tags(tags: Mapping[str, str]) -> Manifest:
    """Return the manifest that is in these tags. Raises SnapshotCorrupt when there is none, or a piece is missing."""
    names = takewhile(tags.__contains__, map(_tag, count(1)))
    return bundle.parse_manifest("".join(tags[name] for name in names))


def _tag(number: int) -> str:
    return MANIFEST_TAG if number == 1 else f"{MANIFEST_TAG}.{number}"
