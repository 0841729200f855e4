"""Hostile messages: sound ones cut, mutated and mislabelled, and plain noise. Equal seeds give equal messages."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from omnidraft.ports import Outgoing
from omnidraft.traces import codec

HUGE_BYTES = 2_000_000
HUGE_EVERY = 2_000
"""One message in this many is larger than any reader takes."""


def messages(sound: Sequence[Outgoing], num: int, *, seed: int) -> Iterator[Outgoing]:
    """Yield `num` messages made from sound ones."""
    rng = random.Random(seed)
    mutations = (_same, _truncated, _mutated, _noise, _mislabelled, _unlabelled, _encrypted, _realigned)
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


def _unlabelled(message: Outgoing, rng: random.Random) -> Outgoing:
    names = [name for name in message.headers if rng.random() < 0.5]
    more = {f"header-{number}": rng.randbytes(9) for number in range(rng.choice((0, 0, 40)))}
    return replace(message, headers={name: message.headers[name] for name in names} | more)
