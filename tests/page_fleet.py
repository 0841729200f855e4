"""A fleet on disk, as the page's operator sees it: a log and a registry, and no worker."""

from pathlib import Path

from omnidraft import config, wiring
from tests.snapshot_folders import make_bundle


def fleet_settings(folder: Path) -> config.Settings:
    """Settings that name models which nobody loads."""
    sections = {
        "models": {"target": "some-target", "drafter": "some-drafter"},
        "log": {"url": f"sqlite:///{folder}/log.db"},
        "registry": {"url": f"directory:///{folder}/registry", "accepted_file": str(folder / "accepted.json")},
        "worker": {"port": 9},
    }
    return config.load(None, {}, **sections)


def publish_two(settings: config.Settings, folder: Path) -> None:
    """Version 1 is champion, version 2 challenger."""
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    registry = wiring.registry(settings)
    registry.publish(make_bundle(folder, "s1", **pair, agreement_after=0.5), None)
    registry.promote(1)
    told = {"agreement_before": 0.5, "agreement_after": 0.625, "losses": {"forward_kl": 1.25}}
    registry.publish(make_bundle(folder, "s2", parent_id="s1", **pair, **told), 1)
