"""An operator's order that a version is to serve. The controller carries it out; see controller.py."""

import time
import uuid
from collections.abc import Callable

from omnidraft.errors import RequestError
from omnidraft.ports import Champion, ControlLog, Order


def order_champion(
    control: ControlLog, version: int, *, timeout_s: float, carry_out: Callable[[], None] = lambda: None
) -> Champion | None:
    """Order that this version serves, and return what serves once the order was answered, which is another version if a
    later order came; None: no controller has answered in time, and the order waits for one.

    Args:
        carry_out: called when the order is in the log; answers it where this process is the controller.

    Raises:
        RequestError: it was refused.
        BusError: the log cannot be read or written.
        ConfigError: orders have to be signed, and this process has no operator's key.
    """
    key = ("order", uuid.uuid4().hex)
    control.put(key, Order(version=version))
    carry_out()
    deadline_s = time.monotonic() + timeout_s
    while True:
        state, _ = control.poll(0.1)
        answer = state.entries.get(key)
        if answer is not None and answer.value is None:
            if answer.reason is not None:
                raise RequestError(answer.reason)
            return state.champion
        if time.monotonic() > deadline_s:
            return None
