"""Iterations that an engine file need not put to the session, because no request can reach a window in them."""

from __future__ import annotations

MAX_SKIPPED = 1024
"""Iterations in a row that are skipped at most.

One iteration in so many costs nothing that can be measured, and what the session knows is never older than that.
"""


def skippable(headroom: int, *, max_drafts: int, in_flight: int) -> int:
    """How many of the coming iterations can be skipped, whatever requests come or end in them.

    A request that comes starts at token 0, unless it says otherwise: then the caller ends the skipping.

    Args:
        headroom: tokens that each request can still make before a capture could begin.
        max_drafts: drafts that an iteration verifies at most for a request. All of them may be accepted.
        in_flight: iterations under way whose results are not known. So many are put to the session before the first
            that may reach a window, since their results are wanted then.
    """
    return min(max(headroom // (1 + max_drafts) - 1 - in_flight, 0), MAX_SKIPPED)


class SkipBudget:
    """Counts skipped iterations down. An engine file takes one from `left` for each, while there are any."""

    def __init__(self) -> None:
        self.left = 0
        self._granted = 0

    def grant(self, iterations: int) -> None:
        """Allow so many iterations to be skipped."""
        self.left = self._granted = iterations

    def settle(self) -> int:
        """How many were skipped since the grant, which ends here."""
        skipped = self._granted - self.left
        self.left = self._granted = 0
        return skipped
