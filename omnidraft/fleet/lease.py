"""The lease of a pair's controller: the right to say which snapshot serves. The newest controller has it.

The control log decides, since all read it in one order, and no clock does: a controller puts a `lease` when it starts,
and of champions that are put later only its own count (ControlState.champion). An earlier controller that still runs
finds out when it next reads or writes, and ends.

What a second controller that is started by mistake can do: end the first one, and end its canary. What neither can do:
make a version the champion for anybody once the other has the lease. An alias is all that a controller may still move
that was frozen in that very call of the registry, or whose call arrives late, to a version that it had itself put as
champion. Whoever has the lease then takes the alias for one that a hand moved; see controller.py.

Where the log is a file of this machine, a lock beside it keeps a second controller from starting at all.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from math import inf
from typing import TypeVar

from filelock import FileLock, Timeout

from omnidraft.errors import BusError, LeaseLost
from omnidraft.ports import Canary, Champion, ControlLog, ControlState, ControlValue, Entry, Key, Lease, Order

START_TIMEOUT_S, READ_BACK_S = 2.0, 10.0

Clock = Callable[[], float]
_Snapshot = TypeVar("_Snapshot", bound=Champion)


class ControllerLease:
    """The control log of one pair as its controller reads and writes it. Methods raise BusError, and LeaseLost once
    another controller has the lease."""

    def __init__(
        self, control: ControlLog, *, lock: FileLock | None = None, restate_s: float = inf, now: Clock = time.time
    ) -> None:
        """
        Args:
            lock: held as long as this process lives; None where the log is not of this machine.
            restate_s: the age at which the champion is put again, before it is too old for who starts.
        """
        self._control, self._lock, self._restate_s, self._now = control, lock, restate_s, now
        self._holder, self.is_taken = uuid.uuid4().hex, False
        self._champion: Champion | None = None
        """The champion that was in force last."""
        self._changes: list[Entry] = []
        self.state = ControlState()

    @property
    def promotion(self) -> str | None:
        """The name of the champion's promotion; None without one."""
        return None if self.state.champion is None else self.state.champion.promotion

    @property
    def orders(self) -> Sequence[tuple[Key, Order]]:
        """The orders of operators that wait, oldest first."""
        waiting = sorted(self.state.entries.values(), key=lambda each: each.sequence)
        return [(each.key, each.value) for each in waiting if isinstance(each.value, Order)]

    def follow(self, timeout_s: float = 0.0) -> Sequence[Entry]:
        """Take the lease if it was not taken, wait so long for changes, and return those since the last call.

        A champion from a controller that had lost its lease is overwritten with the one that was in force.
        """
        if self.is_taken:
            self._read(timeout_s)
        else:
            self._take()
        champion, entry = self.state.champion or self._champion, self.state.entries.get(("champion",))
        if champion is not None and entry is not None:
            age_s = self._now() - entry.at_ms / 1000
            if self.state.champion is None or age_s > self._restate_s:
                self.put_champion(champion, entry.reason)
        changes, self._changes = self._changes, []
        return changes

    def wait(self, timeout_s: float) -> bool:
        """Wait so long for a change; return whether it could. Raises LeaseLost."""
        deadline_s = time.monotonic() + timeout_s
        try:
            while self.is_taken and not self._changes and (left_s := deadline_s - time.monotonic()) > 0:
                self._read(left_s)
        except BusError:  # the next step meets it again
            return False
        return self.is_taken

    def put(self, key: Key, value: ControlValue | None, reason: str | None = None) -> None:
        """Let this hold for every process."""
        self._read(0.0)
        self._control.put(key, value, reason)

    def put_champion(self, champion: Champion, reason: str | None) -> None:
        """Let this snapshot serve; return when the log has it, put under this lease."""
        chosen = self._under_lease(champion)
        before = self.state.sequence("champion")
        self.put(("champion",), chosen, reason)
        deadline_s = time.monotonic() + READ_BACK_S
        while self.state.champion != chosen or self.state.sequence("champion") == before:
            self._read(0.1)
            if time.monotonic() > deadline_s:
                raise BusError(f"the control log does not show champion {chosen.version} after {READ_BACK_S:.0f} s")

    def put_canary(self, canary: Canary, reason: str) -> None:
        """Let this snapshot serve a share of the requests."""
        self.put(("canary",), self._under_lease(canary), reason)

    def require(self) -> None:
        """Raise LeaseLost if another controller is known to have the lease; nothing is read."""
        lease = self.state.value(Lease, "lease")
        if lease is None or lease.holder != self._holder:
            raise LeaseLost("another controller was started for this pair and decides from now on, so this one ends")

    def close(self) -> None:
        """Close the log, and let another controller start where the log is of this machine."""
        self._control.close()
        if self._lock is not None:
            self._lock.release()

    def _under_lease(self, value: _Snapshot) -> _Snapshot:
        return value.model_copy(update={"lease": self.state.sequence("lease")})

    def _take(self) -> None:
        if self._lock is not None and not self._lock.is_locked:
            try:
                self._lock.acquire(timeout=0)
            except Timeout as exc:
                raise LeaseLost(f"another controller runs for this pair: it holds {self._lock.lock_file}") from exc
        self._note(self._control.poll_all(START_TIMEOUT_S))
        accepts, before = self.state.sequence("champion") if self.state.champion else 0, self.state.sequence("lease")
        self._control.put(("lease",), Lease(holder=self._holder, accepts=accepts))
        deadline_s = time.monotonic() + READ_BACK_S
        while self.state.sequence("lease") == before:
            if time.monotonic() > deadline_s:
                raise BusError(f"the control log does not show the lease after {READ_BACK_S:.0f} s")
            self._note(self._control.poll(0.1))
        self.is_taken = True
        self._read(0.0)

    def _read(self, timeout_s: float) -> None:
        self._note(self._control.poll(timeout_s))
        self.require()

    def _note(self, polled: tuple[ControlState, Sequence[Entry]]) -> None:
        self.state, changes = polled
        self._champion = self.state.champion or self._champion
        self._changes += changes
