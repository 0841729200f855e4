"""The controller of a pair works from any settings that name the pair."""

from pathlib import Path

from omnidraft import assembly, config
from omnidraft.assembly.fleet import control_log, recent_records
from omnidraft.ports import Outgoing
from omnidraft.telemetry.metrics import CountingMetrics
from omnidraft.traces import codec
from tests.snapshot_folders import make_bundle
from tests.trace_records import make_record


def fleet_settings(folder: Path) -> config.Settings:
    """Settings that name models which nobody loads."""
    sections = {
        "models": {"target": "some-target", "drafter": "some-drafter"},
        "log": {"url": f"sqlite:///{folder}/log.db"},
        "registry": {"url": f"directory:///{folder}/registry"},
        "worker": {"port": 9},
    }
    return config.load(None, {}, **sections)


def following(settings: config.Settings) -> config.Settings:
    """Settings of a process without a drafter that follows the pair of these."""
    models = settings.models.model_copy(update={"drafter": config.NO_DRAFTER, "memory_of": settings.models.drafter})
    return settings.model_copy(update={"models": models})


def settings_in(folder: Path) -> config.Settings:
    """Version 1 is champion, version 2 a challenger that has to serve two requests."""
    settings = fleet_settings(folder)
    registry = assembly.registry(settings)
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    registry.publish(make_bundle(folder, "s1", **pair, agreement_after=0.5), None)
    registry.promote(1)
    told = {"agreement_before": 0.5, "agreement_after": 0.625, "held_out_records": 8, "agreement_change_error": 0.001}
    registry.publish(make_bundle(folder, "s2", parent_id="s1", **pair, **told), 1)
    canary = settings.controller.model_copy(update={"canary_share": 0.5, "canary_requests": 2})
    return settings.model_copy(update={"controller": canary})


def serve(settings: config.Settings, version: int) -> None:
    """Put two requests of the pair, drafted by this version, into the log."""
    traces = assembly.log_writer(settings, settings.log.traces_topic)
    pair = {"target": settings.models.target, "drafter": settings.models.drafter}
    for number in range(2):
        record = make_record(f"r{version}-{number}", snapshot_version=version, **pair)
        traces.append([Outgoing(codec.key(record), codec.encode(record), codec.headers(record))])
    traces.close()


def test_without_a_drafter_it_judges_and_announces_for_the_pair_that_is_followed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    controller = assembly.controller(following(settings), CountingMetrics())
    control = control_log(settings, CountingMetrics())
    controller.step()
    assert control.poll(0)[0].canary is not None
    serve(settings, 1)
    serve(settings, 2)
    controller.step()
    champion = control.poll(0)[0].champion
    assert champion is not None
    assert champion.version == 2


def test_a_look_at_the_newest_records_outlasts_the_silence_before_a_gap_in_kafkas_log_is_passed(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    log = settings.log.model_copy(update={"request_timeout_s": 7.0})
    recent = recent_records(settings.model_copy(update={"log": log}), "alignment")
    assert recent._idle_s > 2 * log.request_timeout_s
