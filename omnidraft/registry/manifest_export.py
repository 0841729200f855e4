"""Export a manifest for people: the registered name, and parameters, metrics, tags and a page of markdown."""

import re
from collections.abc import Mapping
from hashlib import sha256
from itertools import count, takewhile
from pathlib import Path

from omnidraft.ports import SKIP_REASONS
from omnidraft.snapshots import bundle
from omnidraft.snapshots.manifest import Manifest

MANIFEST_TAG = "omnidraft.manifest"
"""The tag with the manifest, or with the first piece of it; the others are `omnidraft.manifest.2` and so on."""
_OF_RECORDS = {*SKIP_REASONS, "held_out", "duplicate"}
"""Reasons in a manifest's counts that count records; the others count positions of those that were learned."""
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


def pair_name(drafter: str, target: str) -> str:
    """Return `omnidraft.<drafter>.<target>`, with every character that MLflow or a file system may refuse replaced.

    Of a model's folder it has the last part, and a few digits that tell it from others of this name.
    """
    return ".".join(["omnidraft", _short(drafter), _short(target)])


def folder_name(version: int, manifest: Manifest) -> str:
    """Return the folder name of a local copy of one version."""
    return f"v{version:06d}-{_plain(manifest.snapshot_id)}"


def params(manifest: Manifest) -> dict[str, str]:
    """Return the parameters, which do not change while a snapshot is judged."""
    fields = manifest.model_dump(exclude={"offsets", "losses", "counts", "sha256", "signature"}, exclude_none=True)
    fields |= fields.pop("settings", {})
    return {name: str(value) for name, value in fields.items() if isinstance(value, str) and value}


def metrics(manifest: Manifest) -> dict[str, float]:
    """Return every number of the manifest, losses as `loss/<name>` and skipped records as `skipped/<reason>`."""
    counts = ("num_records", "num_tokens", "num_steps", "held_out_records")
    agreement = ("agreement_before", "agreement_after", "agreement_change_error")
    numbers = {name: getattr(manifest, name) for name in (*counts, *agreement, "speedup_before", "speedup_after")}
    numbers |= {f"loss/{name}": value for name, value in manifest.losses.items()}
    numbers |= {f"skipped/{reason}": count for reason, count in manifest.counts.items()}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def tags(manifest: Manifest) -> dict[str, str]:
    """Return the tags that an operator wants to see in a list of versions."""
    shown = {"snapshot_id": manifest.snapshot_id, "parent": manifest.parent_id or "none", "train": manifest.train}
    shown["offsets"] = (
        " ".join(f"{partition}:{offset}" for partition, offset in sorted(manifest.offsets.items())) or "none"
    )
    shown["agreement"] = _agreement(manifest)
    return shown


def description(manifest: Manifest, version: int, parent: int | None) -> str:
    """Return a page of markdown about the training of this version, its data and its agreement."""
    left_out = sorted(manifest.counts.items())
    parent_text = f"version {parent}" if parent else f"`{manifest.parent_id}`"
    rows = {
        "Held-out agreement": _agreement(manifest),
        "Learned from": f"{manifest.num_records:,} records, {manifest.num_tokens:,} tokens",
        "Steps": f"{manifest.num_steps:,}",
        "Losses since the parent": ", ".join(f"{name} {value:.4f}" for name, value in sorted(manifest.losses.items())),
        "Records left out": ", ".join(f"{count:,} {reason}" for reason, count in left_out if reason in _OF_RECORDS),
        "Positions left out": ", ".join(f"{count:,} {of}" for of, count in left_out if of not in _OF_RECORDS),
        "Trace offsets": tags(manifest)["offsets"],
        "Weights": manifest.train,
        "Parent": parent_text if manifest.parent_id else "none, the first of its pair",
        "Code": manifest.code_version,
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    title = f"**{manifest.drafter}** drafting for **{manifest.target}**, snapshot `{manifest.snapshot_id}`"
    return f"{title}\n\n| | |\n| --- | --- |\n{table}\n\nTo serve it: `omnidraft snapshots promote {version}`\n"


def _agreement(manifest: Manifest) -> str:
    if manifest.agreement_before is None or manifest.agreement_after is None:
        return "not measured"
    change = manifest.agreement_after - manifest.agreement_before
    change_text = f"{manifest.agreement_before:.4f} to {manifest.agreement_after:.4f} ({change:+.4f})"
    return f"{change_text} on {manifest.held_out_records} records"


def _short(model: str) -> str:
    path = Path(model)
    if not path.is_absolute():
        return _plain(model)
    return f"{_plain(path.name)}-{sha256(model.encode()).hexdigest()[:6]}"


def _plain(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip(".-") or "unnamed"
