"""Whose turn it is: one at a time, first come first served."""

from __future__ import annotations

import asyncio
from collections import deque


class QueueFull(Exception):
    """As many wait already as may."""


class Closed(Exception):
    """Nobody gets a turn any more."""


class Turns:
    """A queue for one thing that is used by one at a time.

    Parameters
    ----------
    limit
        how many may wait, whoever has the turn not counted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.closed = False
        self._busy = False
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(not ticket.done() for ticket in self._waiting)

    @property
    def busy(self) -> bool:
        """Whether somebody has the turn."""
        return self._busy

    async def enter(self) -> None:
        """Wait for the turn; whoever is cancelled meanwhile gives up his place.

        Raises
        ------
        QueueFull, Closed
            at once, or when the queue is closed while waiting.
        """
        if self.closed:
            raise Closed
        if not self._busy:
            self._busy = True
            self._idle.clear()
            return
        if self.waiting >= self.limit:
            raise QueueFull
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(ticket)
        try:
            await ticket
        except asyncio.CancelledError:
            if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                self.leave()  # it was handed over in the same moment
            raise

    def leave(self) -> None:
        """Hand the turn to the one who has waited longest."""
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_result(None)
                return
        self._busy = False
        self._idle.set()

    def close(self) -> None:
        """Send all who wait away, and all who come from now on; whoever has the turn keeps it."""
        self.closed = True
        while self._waiting:
            ticket = self._waiting.popleft()
            if not ticket.done():
                ticket.set_exception(Closed())

    async def idle(self) -> None:
        """Wait until nobody has the turn."""
        await self._idle.wait()
