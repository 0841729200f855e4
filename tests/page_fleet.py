"""A fleet on disk, as the page's operator sees it: a log and a registry, and no worker."""

from pathlib import Path

from omnidraft import config, wiring
from omnidraft.fleet.control_log import publish_announcement
from omnidraft.ports import JUDGEMENT
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


def following(settings: config.Settings) -> config.Settings:
    """Settings of a process without a drafter that follows the pair of these."""
    models = settings.models.model_copy(update={"drafter": config.NO_DRAFTER, "memory_of": settings.models.drafter})
    return settings.model_copy(update={"models": models})


def publish_two(settings: config.Settings, folder: Path) -> None:
    """Version 1 is champion, version 2 a challenger that was refused; a tenant's traffic drifted and came back."""
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    registry = wiring.registry(settings)
    registry.publish(make_bundle(folder, "s1", **pair, agreement_after=0.5), None)
    registry.promote(1)
    told = {"agreement_before": 0.5, "agreement_after": 0.625, "losses": {"forward_kl": 1.25}}
    registry.publish(make_bundle(folder, "s2", parent_id="s1", **pair, **told), 1)
    registry.annotate(2, {JUDGEMENT: "refused: not better enough"})
    control = wiring.log_writer(settings, settings.log.control_topic)
    publish_announcement(control, "champion", 1, **pair)
    publish_announcement(control, "drift", tenant="acme", reason="acme: agreement fell from 0.7 to 0.4", **pair)
    publish_announcement(control, "drift_over", tenant="acme", reason="acme: agreement was back at 0.7", **pair)
    control.close()
