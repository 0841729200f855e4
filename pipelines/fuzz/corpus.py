"""Messages that nobody should send: sound ones cut, mutated and mislabelled, and plain noise. A seed gives the same."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from omnidraft.ports import Outgoing

HUGE_BYTES = 2_000_000
HUGE_EVERY = 2_000
"""One message in so many is larger than any reader takes."""


def messages(sound: Sequence[Outgoing], num: int, *, seed: int) -> Iterator[Outgoing]:
    """`num` messages made from these."""
    dice = random.Random(seed)
    breaks = (_same, _truncated, _mutated, _noise, _mislabelled, _unlabelled, _locked)
    for number in range(num):
        made = dice.choice(breaks)(dice.choice(sound), dice)
        if number % HUGE_EVERY == HUGE_EVERY - 1:
            made = replace(made, value=bytes(HUGE_BYTES))
        yield replace(made, key=str(number).encode())


def _same(message: Outgoing, dice: random.Random) -> Outgoing:
    return message


def _truncated(message: Outgoing, dice: random.Random) -> Outgoing:
    return replace(message, value=message.value[: dice.randrange(len(message.value))])


def _mutated(message: Outgoing, dice: random.Random) -> Outgoing:
    value = bytearray(message.value)
    for _ in range(dice.randint(1, 8)):
        value[dice.randrange(len(value))] = dice.randrange(256)
    return replace(message, value=bytes(value))


def _noise(message: Outgoing, dice: random.Random) -> Outgoing:
    return replace(message, value=dice.randbytes(dice.randrange(600)))


def _mislabelled(message: Outgoing, dice: random.Random) -> Outgoing:
    name = dice.choice([*message.headers, "unknown"])
    value = dice.choice((b"", b"2", b"99", b"-1", dice.randbytes(dice.randrange(1, 2000))))
    return replace(message, headers={**message.headers, name: value})


def _locked(message: Outgoing, dice: random.Random) -> Outgoing:
    """It says that it is encrypted, and no key opens it."""
    return replace(message, headers={**message.headers, "encryption": b"fernet"})


def _unlabelled(message: Outgoing, dice: random.Random) -> Outgoing:
    kept = [name for name in message.headers if dice.random() < 0.5]
    many = {f"header-{number}": dice.randbytes(9) for number in range(dice.choice((0, 0, 40)))}
    return replace(message, headers={name: message.headers[name] for name in kept} | many)
