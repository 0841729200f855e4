"""Checks of the log: the connection, the topics' configuration, the learner's next offsets, and the clocks."""

import time
from contextlib import closing

from omnidraft.config import LogSettings, Settings
from omnidraft.doctor.finding import Finding, ok, problem, warning
from omnidraft.errors import LogReplaced
from omnidraft.ports import LogReader, Message, TopicFacts

NEEDED_MESSAGE_BYTES = 1_000_000
"""The size of the largest dead letter, with its headers."""
HOUR_MS = 3_600_000
LEAST_RETENTION_HOURS = 24
SKEW_MS = 2_000
"""The time by which another clock may be ahead of ours."""
POLL_S = 3.0


def connection(settings: Settings) -> Finding:
    """Check that the log answers, without creating anything."""
    from omnidraft import assembly

    if not settings.log.exists:
        advice = "start a worker or a distiller, or correct log.url (OMNIDRAFT_LOG) if there should be one"
        return warning("log", f"nothing at {settings.log.url} yet", advice)
    topics = assembly.topic_names(settings)
    return ok("log", f"{settings.log.url} answers and has {len(topics)} of 3 topics")


def topic(settings: Settings, name: str) -> Finding:
    """Check one topic: existence, partitions, message size, retention."""
    from omnidraft import assembly

    check, log = f"topic {name}", settings.log
    facts = assembly.topics(settings).get(name) if settings.log.exists else None
    if facts is None:
        return warning(check, "not there yet", "start what uses it, which makes it")
    if facts.max_message_bytes is not None and facts.max_message_bytes < NEEDED_MESSAGE_BYTES:
        message = f"takes messages of {facts.max_message_bytes:,} bytes, {NEEDED_MESSAGE_BYTES:,} are needed"
        return problem(check, message, "raise the topic's max.message.bytes to 2097152")
    message = f"{facts.num_partitions} partitions, the settings say {log.partitions}"
    if name == log.traces_topic and facts.num_partitions != log.partitions:
        return warning(check, message, "set log.partitions to what the topic has; they count when a topic is made")
    return _retention(check, log, name, facts) or ok(check, f"{facts.num_partitions} partitions")


def _retention(check: str, log: LogSettings, name: str, facts: TopicFacts) -> Finding | None:
    """Return a warning about the topic's retention, or None."""
    hours = None if facts.retention_ms is None else facts.retention_ms / HOUR_MS
    expected = {
        log.traces_topic: ("log.retention_hours", log.retention_hours),
        log.dead_letters_topic: ("log.dead_letters_retention_hours", log.dead_letters_retention_hours),
    }
    setting, limit = expected.get(name, ("", None))
    message = "keeps messages for ever" if hours is None else f"keeps messages for {hours:.1f} hours"
    if limit is not None and (hours is None or abs(hours - limit) > 0.01 * limit):
        advice = f"set the topic's retention.ms to {limit * HOUR_MS:.0f}; settings count when a topic is made"
        return warning(check, f"{message}, {setting} says {limit:g}", advice)
    if name == log.control_topic and hours is not None:
        return warning(
            check, message, "set the topic's cleanup.policy to compact: a pause that expires is a pause that ends"
        )
    if hours is not None and limit is None and hours < LEAST_RETENTION_HOURS:
        return warning(check, message, "raise retention.ms: what a learner that was away has not read by then is lost")
    return None


def position(settings: Settings) -> Finding:
    """Check that the log still holds the next offsets of this pair's learner."""
    from omnidraft import assembly
    from omnidraft.distill.ingest.ingest import require_same_log

    check = f"position of {settings.models.target}"
    versions = assembly.existing_registry(settings).versions()
    name = settings.log.traces_topic
    if not versions or not settings.log.exists or name not in assembly.topic_names(settings):
        return ok(check, "nothing is learned yet")
    newest, manifest = versions[-1].version, versions[-1].manifest
    with closing(assembly.log_reader(settings, name)) as reader:
        log_id, firsts, ends = reader.identity(), reader.first_offsets(), reader.end_offsets()
    try:
        require_same_log(manifest.log_id, log_id, manifest.offsets, ends)
    except LogReplaced as exc:
        return problem(check, f"version {newest} cannot go on: {exc}", "see `omnidraft learning restart --help`")
    expired = sum(max(0, first - manifest.offsets.get(partition, 0)) for partition, first in firsts.items())
    if expired:
        advice = "start the distiller, which goes on at the oldest that is left; raise log.retention_hours"
        return warning(check, f"{expired:,} messages expired before version {newest} came to them", advice)
    behind = sum(end - manifest.offsets.get(partition, 0) for partition, end in ends.items())
    return ok(check, f"version {newest} is {behind:,} records behind the end")


def clocks(settings: Settings, now_ms: int | None = None) -> Finding:
    """This machine's against the newest trace record's.

    Args:
        now_ms: the time by this machine's clock; None reads it.
    """
    from omnidraft import assembly

    check, name = "clock", settings.log.traces_topic
    facts = assembly.topics(settings).get(name) if settings.log.exists else None
    if facts is None:
        return ok(check, "no record to compare with")
    with closing(assembly.log_reader(settings, name)) as reader:
        newest = _newest(reader)
    if newest is None:
        return ok(check, "no record to compare with")
    ahead_ms = newest.timestamp_ms - (time.time_ns() // 1_000_000 if now_ms is None else now_ms)
    whose = "the log's" if facts.stamped_by == "log" else "its writer's"
    message = f"record {newest.partition}:{newest.offset} is {abs(ahead_ms) / 1000:.0f} s"
    if ahead_ms > SKEW_MS:
        return problem(check, f"{message} in the future, by {whose} clock", "set the clocks of both machines (NTP)")
    return ok(check, f"{message} old, by {whose} clock")


def _newest(reader: LogReader) -> Message | None:
    """Return the newest message of all partitions by timestamp; None when there is none."""
    ends = reader.end_offsets()
    reader.seek_back(1)
    last_messages: list[Message] = []
    expected = sum(end > 0 for end in ends.values())
    while len(last_messages) < expected and (messages := reader.poll(expected, POLL_S).messages):
        last_messages.extend(messages)
    return max(last_messages, key=lambda each: each.timestamp_ms, default=None)
