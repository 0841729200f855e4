"""Who is next in front of one engine: start-time fair queueing over payers, by the seconds their texts took.

Whoever has paid least is next, first come first served among its own requests. Who comes back after a while starts
where the last one served stood, so that nobody saves up time by staying away. A full line makes room for a payer with
few requests by giving up the newest one of the payer with most: one client cannot fill it for all.
Source: Goyal, Vin, Cheng 1996, https://doi.org/10.1145/248156.248171; for language models: Sheng et al. 2024,
https://arxiv.org/abs/2401.00588.
"""

from collections import deque

from omnidraft.serving.queued_request import QueuedRequest

REMEMBERED = 256
"""Payers who have nothing waiting, and whose time is remembered."""


class FairQueue:
    """Not shared between threads; its owner holds a lock."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[QueuedRequest]] = {}
        """Only payers with something waiting, in the order in which they came."""
        self._paid_s: dict[str, float] = {}
        self._floor_s = 0.0
        """What the payer served last had paid when its turn came."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, ticket: QueuedRequest) -> None:
        """Behind its payer's others."""
        if ticket.client not in self._waiting:
            self._waiting[ticket.client] = deque()
            self._paid_s[ticket.client] = max(self._paid_s.get(ticket.client, 0.0), self._floor_s)
        self._waiting[ticket.client].append(ticket)

    def next(self) -> QueuedRequest:
        """Take the next one out; there must be one."""
        payer = min(self._waiting, key=lambda each: self._paid_s[each])
        self._floor_s = self._paid_s[payer]
        ticket = self._waiting[payer].popleft()
        self._leave_if_empty(payer)
        return ticket

    def pay(self, payer: str, seconds: float) -> None:
        """What a ticket of this payer took."""
        self._paid_s[payer] = self._paid_s.get(payer, self._floor_s) + seconds
        if not self._waiting:
            self._paid_s.clear()  # nobody is left to share with
            self._floor_s = 0.0
        elif len(self._paid_s) - len(self._waiting) > REMEMBERED:
            away = [other for other in self._paid_s if other not in self._waiting]
            del self._paid_s[min(away, key=lambda other: self._paid_s[other])]

    def remove(self, ticket: QueuedRequest) -> bool:
        """Take this one out; False when it does not wait here."""
        waiting = self._waiting.get(ticket.client, deque())
        if ticket not in waiting:
            return False
        waiting.remove(ticket)
        self._leave_if_empty(ticket.client)
        return True

    def make_room(self, payer: str) -> QueuedRequest | None:
        """The newest ticket of whoever has most waiting, taken out for this payer; None when it has no fewer itself."""
        most = max(self._waiting, key=lambda each: len(self._waiting[each]))
        if len(self._waiting[most]) <= len(self._waiting.get(payer, ())) + 1:
            return None
        return self._waiting[most].pop()

    def clear(self) -> list[QueuedRequest]:
        """Take all out."""
        tickets = [ticket for waiting in self._waiting.values() for ticket in waiting]
        self._waiting.clear()
        return tickets

    def _leave_if_empty(self, payer: str) -> None:
        if not self._waiting[payer]:
            del self._waiting[payer]
