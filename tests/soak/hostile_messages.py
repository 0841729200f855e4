"""Hostile messages: sound ones cut, mutated and mislabelled, records that lie, and plain noise. Equal seeds give equal
messages."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from omnidraft.ports import Outgoing
from omnidraft.traces import codec
from omnidraft.traces.record import MAX_ID, MAX_TENANT_BYTES, TraceRecord

HUGE_BYTES = 2_000_000
HUGE_EVERY = 2_000
"""One message in this many is larger than any reader takes."""


def messages(sound: Sequence[Outgoing], num: int, *, seed: int) -> Iterator[Outgoing]:
    """Yield `num` messages made from sound ones."""
    rng = random.Random(seed)
    mutations = (_same, _truncated, _mutated, _noise, _mislabelled, _unlabelled, _encrypted, _realigned, _lying)
    for number in range(num):
        message = rng.choice(mutations)(rng.choice(sound), rng)
        if number % HUGE_EVERY == HUGE_EVERY - 1:
            message = replace(message, value=bytes(HUGE_BYTES))
        yield replace(message, key=str(number).encode())


def _same(message: Outgoing, rng: random.Random) -> Outgoing:
    return message


def _truncated(message: Outgoing, rng: random.Random) -> Outgoing:
    return replace(message, value=message.value[: rng.randrange(len(message.value))])


def _mutated(message: Outgoing, rng: random.Random) -> Outgoing:
    value = bytearray(message.value)
    for _ in range(rng.randint(1, 8)):
        value[rng.randrange(len(value))] = rng.randrange(256)
    return replace(message, value=bytes(value))


def _noise(message: Outgoing, rng: random.Random) -> Outgoing:
    return replace(message, value=rng.randbytes(rng.randrange(600)))


def _mislabelled(message: Outgoing, rng: random.Random) -> Outgoing:
    name = rng.choice([*message.headers, "unknown"])
    value = rng.choice((b"", b"2", b"99", b"-1", rng.randbytes(rng.randrange(1, 2000))))
    return replace(message, headers={**message.headers, name: value})


def _encrypted(message: Outgoing, rng: random.Random) -> Outgoing:
    """Mark a message as encrypted with an unknown key."""
    return replace(message, headers={**message.headers, "encryption": b"fernet"})


def _realigned(message: Outgoing, rng: random.Random) -> Outgoing:
    """Return a sound record of another pair of vocabularies."""
    record = codec.decode(message.value, message.headers)
    return replace(message, value=codec.encode(replace(record, alignment=rng.randbytes(8).hex())))


def _lying(message: Outgoing, rng: random.Random) -> Outgoing:
    return lying(message, rng, rng.choice(LIES))


def lying(
    message: Outgoing, rng: random.Random, about: Callable[[TraceRecord, random.Random], dict[str, Any]]
) -> Outgoing:
    """Return a record that is sound in form and of the same pair, but untrue about something."""
    record = codec.decode(message.value, message.headers)
    lie = replace(record, request_id=f"lie-{rng.random()}", **about(record, rng))
    return replace(message, value=codec.encode(lie), headers=codec.headers(lie))


def _about_times(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    return {"time_ms": rng.choice((0, 1, 1 << 52, (1 << 63) - 1)), "snapshot_version": 1 << 40}


def _about_tokens(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    """Ids that neither vocabulary has."""
    emitted, prompt = np.full_like(record.emitted_ids, MAX_ID), np.full_like(record.drafter_prompt_ids, MAX_ID)
    return {"emitted_ids": emitted} if rng.random() < 0.5 else {"drafter_prompt_ids": prompt}


def _about_beliefs(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    """Nothing was probable, or all of it alike."""
    if record.beliefs is None:
        return {}
    columns = ("top_log_p_EK", "emitted_log_p_E", "tail_log_p_E")
    lies = {name: np.full_like(getattr(record.beliefs, name), rng.choice(LOG_PS)) for name in columns}
    return {"beliefs": replace(record.beliefs, **lies)}


def _about_agreement(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    """All that was drafted was right, or nothing: who sends many of these has a drift whenever he likes."""
    rounds, is_right = record.rounds, rng.random() < 0.5
    num_R = rounds.num_nodes_R if is_right else np.zeros_like(rounds.num_accepted_R)
    return {"rounds": replace(rounds, accepted_M=np.full_like(rounds.accepted_M, is_right), num_accepted_R=num_R)}


def _about_drafts(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    """The drafter believed in nothing, and took for ever."""
    rounds, longest = record.rounds, np.finfo(np.float32).max
    log_q_M, draft_s_R = np.full_like(rounds.log_q_M, rng.choice(LOG_PS)), np.full_like(rounds.draft_s_R, longest)
    return {"rounds": replace(rounds, log_q_M=log_q_M, draft_s_R=draft_s_R)}


def _about_tenants(record: TraceRecord, rng: random.Random) -> dict[str, Any]:
    return {"tenant": rng.choice(("", "x" * MAX_TENANT_BYTES, "\x1b[2J", "../../etc", f"new-{rng.random()}"))}


def _unlabelled(message: Outgoing, rng: random.Random) -> Outgoing:
    names = [name for name in message.headers if rng.random() < 0.5]
    more = {f"header-{number}": rng.randbytes(9) for number in range(rng.choice((0, 0, 40)))}
    return replace(message, headers={name: message.headers[name] for name in names} | more)


LOG_PS = (-np.inf, -60_000.0, 0.0)
LIES = (_about_times, _about_tokens, _about_beliefs, _about_agreement, _about_drafts, _about_tenants)
